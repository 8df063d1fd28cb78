// Scalars of 16 bits, and words of them, by ordinary means.
#pragma once
#define DEVICE inline

using Word = unsigned int;  // two 16-bit scalars, the lower one first, or one float

struct bf16 {
  unsigned short bits;
};

struct f16 {
  unsigned short bits;
};

DEVICE Word float_bits(float value) {
  Word bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

DEVICE float bits_float(Word bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

DEVICE float to_float(float value) { return value; }
DEVICE float to_float(bf16 value) { return bits_float(static_cast<Word>(value.bits) << 16); }
DEVICE float to_float(f16 value) {
  const Word sign = static_cast<Word>(value.bits & 0x8000) << 16;
  const Word shifted = static_cast<Word>(value.bits & 0x7fff) << 13;
  // A power of two moves the exponent to its place, of subnormal values too.
  const Word finite = float_bits(bits_float(shifted) * 0x1p112f);
  return bits_float(sign | (shifted >= 0x0f800000 ? shifted | 0x7f800000 : finite));
}

namespace host {

inline Word round_to_bf16(float value) {
  const Word bits = float_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline Word round_to_f16(float value) {
  const Word bits = float_bits(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return 0x7fff;
  if (size >= 0x477ff000) return sign | 0x7c00;  // from 65520 on the nearest is infinite
  // Below 2^-14 a result's last place is 2^-24, which is that of floats from 0.5 to 1: the addition rounds.
  if (size < 0x38800000) return sign | (float_bits(bits_float(size) + 0.5f) - 0x3f000000);
  return sign | ((size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13);
}

}  // namespace host
