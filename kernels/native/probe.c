// The least kernel: whether a compiler, the headers and torch's threads are all there.
#include "plait.h"

EXPORT void probe(int64_t *threads) {
    *threads = 0;
#pragma omp parallel
#pragma omp atomic
    *threads += 1;
}
