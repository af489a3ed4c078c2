// One translation unit, for most of the time to compile goes to PyTorch's headers. (machine.cpp comes
// last: it has a `join` of its own, which would hide the one of machine.h.)
#include "autocast.cpp"
#include "device.cpp"
#include "memory.cpp"
#include "operators.cpp"

#include "machine.cpp"
