"""The maths of denoising: transition kernels, sigma schedules, keyed noise, step choice. Needs torch alone."""
