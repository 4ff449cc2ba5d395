"""The native decoder for CPUs: a whole step in one call of a C++ library.

Needs nothing but a C++17 compiler, once. What differs between instruction sets stands in one
header each (simd_*.h); everything else is written in their vector operations.
"""

from kernels.cpu.decoder import NativeDecoder, load_decoder

__all__ = ["NativeDecoder", "load_decoder"]
