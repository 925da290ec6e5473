// One binary for every processor: loops are compiled twice, for AVX2, which all of them have, and for AVX-512,
// and the processor decides when they run.
#pragma once

#include <cstdint>

namespace llmc::cpu {

// Whether this processor has AVX-512; ONEDNN_MAX_CPU_ISA=AVX2 hides it, from oneDNN and from us.
bool has_avx512();

// f(i) for i in begin ... end-1, compiled for AVX-512: `flatten` inlines all that f calls, so that it is compiled
// under this function's instruction set too.
template <class F>
#if defined(__x86_64__)
[[gnu::flatten, gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]]
#endif
void loop_in_avx512(std::int64_t begin, std::int64_t end, const F& f) {
    for (std::int64_t i = begin; i < end; ++i) f(i);
}

// f(i) for i in begin ... end-1 with the widest vectors there are.
template <class F>
void in_wide_vectors(std::int64_t begin, std::int64_t end, const F& f) {
    if (has_avx512()) return loop_in_avx512(begin, end, f);
    for (std::int64_t i = begin; i < end; ++i) f(i);
}

}  // namespace llmc::cpu
