// Gives AVX-VNNI's intrinsic to a machine with AVX2 alone, by SIMDe; included before the sources.
#pragma once

#include <immintrin.h>

#include <simde/x86/avx512/dpbusd.h>

#define __AVXVNNI__
// SIMDe has AVX-512's form alone, which computes the same.
#define _mm256_dpbusd_avx_epi32(sum, a, b) simde_mm256_dpbusd_epi32(sum, a, b)
