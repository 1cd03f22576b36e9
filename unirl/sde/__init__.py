"""Mathematics of denoising: kernels, sigma schedules, guidance, keyed noise, step choice. Needs torch alone."""
