// The least kernel: whether a compiler, the headers and torch's threads are all there.
#include "plait.h"

EXPORT void probe(void) {}
