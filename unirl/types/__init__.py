"""The nouns: containers of samples, requests, responses, and the Protocols that packages meet at."""
