"""Reads model files into `kernels.decoder.DecoderWeights`."""
