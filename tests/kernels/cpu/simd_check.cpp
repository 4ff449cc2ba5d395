// Holds the vector operations against scalar arithmetic; prints what is wrong and exits with 1.
#include "simd.h"

#include <cmath>
#include <cstdio>
#include <initializer_list>

using namespace quire::simd;

static int failures = 0;

static void expect(bool holds, const char* what, double at) {
  if (!holds && ++failures < 10) std::printf("%s is wrong at %g\n", what, at);
}

// |got - wanted| in units of wanted's last place
static double units(float got, double wanted) {
  const float next = std::nextafter(static_cast<float>(wanted), INFINITY);
  return std::fabs(got - wanted) / (static_cast<double>(next) - static_cast<float>(wanted));
}

static void check_silu() {
  const Floats a = splat(1.0f + 0x1p-12f);
  const bool rounds_once = fused_multiply_add(a, a, splat(0.0f) - a * a)[0] != 0.0f;
  for (float x = -87.0f; x <= 100.0f; x += 0.0009f) {
    const double wanted = x / (1.0 + std::exp(-static_cast<double>(x)));
    expect(units(silu(splat(x))[kLanes - 1], wanted) <= 3.0 + std::fabs(x) * (rounds_once ? 0.25 : 2.0), "silu", x);
  }
  expect(silu(splat(0.0f))[0] == 0.0f, "silu", 0);
  expect(silu(splat(INFINITY))[0] == INFINITY, "silu", INFINITY);
  expect(std::fabs(silu(splat(-1000.0f))[0]) < 1e-34f, "silu", -1000);
  expect(std::isnan(silu(splat(NAN))[0]), "silu", NAN);
}

static float power_of(float x) {
  Floats several[3] = {splat(0.0f), splat(x), splat(-INFINITY)};
  power_of_two(several);
  expect(several[0][0] == 1.0f && several[2][0] == 0.0f, "power_of_two's neighbour", x);
  return several[1][kLanes - 1];
}

static void check_power_of_two() {
  for (float x = -126.0f; x <= 0.0f; x += 0.0009f) {
    expect(units(power_of(x), std::exp2(static_cast<double>(x))) <= 2.0, "power_of_two", x);
  }
  expect(power_of(0.0f) == 1.0f, "power_of_two", 0);
  expect(power_of(-126.6f) == 0.0f, "power_of_two", -126.6);
  expect(power_of(-1000.0f) == 0.0f, "power_of_two", -1000);
  expect(std::isnan(power_of(NAN)), "power_of_two", NAN);
}

static double half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const double size = exponent == 0 ? std::ldexp(fraction, -24)
                      : exponent == 31 ? (fraction == 0 ? INFINITY : NAN)
                                       : std::ldexp(1024 + fraction, exponent - 25);
  return bits & 0x8000 ? -size : size;
}

static void check_halves() {
  for (int bits = 0; bits < 65536; ++bits) {
    uint16_t halves[kLanes] = {};
    halves[kLanes - 1] = static_cast<uint16_t>(bits);
    const float got = load_half(halves)[kLanes - 1];
    const double wanted = half_value(static_cast<uint16_t>(bits));
    expect(std::isnan(wanted) ? std::isnan(got) : got == wanted, "load_half", bits);
  }
}

// Sums of four products, unsigned by signed
template <bool adds_quads = kAddsQuads>
static Ints dot_quads(Bytes weights, Bytes values) {
  if constexpr (adds_quads) {
    return add_quads(Ints{}, weights, values);
  } else {
    const Shorts even = (reinterpret_cast<Shorts>(values) << 8) >> 8, odd = reinterpret_cast<Shorts>(values) >> 8;
    return dot_words(even_unsigned(weights), even) + dot_words(odd_unsigned(weights), odd);
  }
}

static void check_signed_bytes() {
  for (int value = -128; value < 128; ++value) {
    int8_t bytes[kLanes] = {};
    bytes[kLanes - 1] = static_cast<int8_t>(value);
    const Floats got = load_signed_bytes(bytes);
    expect(got[kLanes - 1] == value && got[0] == 0.0f, "load_signed_bytes", value);
  }
}

static void check_dots() {
  const int extremes[] = {0, 1, 15, 63, 128, 255};
  const int activations[] = {-127, -1, 0, 1, 127};
  for (int w : extremes) {
    for (int x : activations) {
      Bytes weights, values;
      for (int i = 0; i < 4 * kLanes; ++i) {
        weights[i] = static_cast<uint8_t>(w);
        values[i] = static_cast<uint8_t>(x);
      }
      expect(dot_quads(weights, values)[kLanes - 1] == 4 * w * x, "dot of four", w);
      if (w > 15) continue;
      Shorts eight = {};
      for (int i = 0; i < 8; ++i) eight += dot_pairs(weights, values);
      expect(add_pairs(eight)[kLanes - 1] == 32 * w * x, "dot_pairs", w);
    }
  }
}

static void check_powers() {
  for (int n = -100; n <= 100; ++n) {
    const float power = std::ldexp(1.0f, n);
    for (const float x : {-1.75f, -0x1p-24f, 0x1p-24f, 0x1.fffffep21f}) {
      expect(times_power(over_one(splat(x)), splat(power))[0] == x * power, "times_power", power);
    }
  }
}

int main() {
  check_silu();
  check_power_of_two();
  check_halves();
  check_signed_bytes();
  check_dots();
  check_powers();
  return failures == 0 ? 0 : 1;
}
