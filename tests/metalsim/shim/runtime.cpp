// The runtime as one translation unit: it is built in one go.
#include "fault.cpp"
#include "fiber.cpp"
#include "memory.cpp"
#include "scheduler.cpp"

// Rounds float to bfloat, nearest even. Compilers call it; their support libraries lack it in part.
extern "C" __bf16 __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  const uint16_t upper =
      (uint16_t)(nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  __bf16 result;
  memcpy(&result, &upper, 2);
  return result;
}
