"""Changes the optimizer: 8-bit or host state, the loop over parameters, and updates inside backward."""
