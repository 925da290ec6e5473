#include "dev/cpu/ceilings.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <oneapi/dnnl/dnnl.hpp>
#include <vector>

#include "llmc/device/cpu/cpu_device.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/products.h"

namespace llmc::bench {

namespace {

template <class F>
double best_seconds(int tries, const F& f) {
    double best = 1e30;
    for (int i = 0; i < tries; ++i) {
        const auto start = std::chrono::steady_clock::now();
        f();
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        best = std::min(best, elapsed.count());
    }
    return best;
}

}  // namespace

double product_ceiling(DType dtype, int threads) {
    using Memory = dnnl::memory;
    const bool bf16 = dtype == DType::bf16 && cpu::processor_has_bf16();
    const auto type = bf16 ? Memory::data_type::bf16 : Memory::data_type::f32;
    const int threads_before = omp_get_max_threads();
    omp_set_num_threads(threads);
    dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    dnnl::stream stream(engine);

    double best_rate = 0;
    // The fastest size differs between processors.
    for (const std::int64_t n : {768, 1024, 1536, 2048, 3072}) {
        const auto any = [&] { return Memory::desc({n, n}, type, Memory::format_tag::any); };
        const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(any(), any(), any()), engine);
        Memory a(description.src_desc(), engine), b(description.weights_desc(), engine),
            c(description.dst_desc(), engine);
        for (Memory* m : {&a, &b, &c})
            std::fill_n(static_cast<std::uint8_t*>(m->get_data_handle()), m->get_desc().get_size(), 0);
        const dnnl::matmul product(description);
        const double seconds = best_seconds(8, [&] {
            product.execute(stream, {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}});
            stream.wait();
        });
        const auto size = static_cast<double>(n);
        best_rate = std::max(best_rate, 2 * size * size * size / seconds);
    }
    omp_set_num_threads(threads_before);
    return best_rate;
}

double memory_ceiling(int threads) {
    constexpr std::int64_t floats = std::int64_t{64} << 20;  // 256 MiB per array
    std::vector<float> from(floats, 1.0F), to(floats);
    const double seconds = best_seconds(5, [&] {
        cpu::parallel_pieces(threads, floats, [&](std::int64_t begin, std::int64_t end) {
            std::copy(from.begin() + begin, from.begin() + end, to.begin() + begin);
        });
    });
    return 2.0 * sizeof(float) * static_cast<double>(floats) / seconds;
}

double read_ceiling(int threads) {
    constexpr std::int64_t pieces = 1024, floats = std::int64_t{128} << 20;  // 512 MiB
    cpu::CpuDevice device(threads);
    const auto* const from = reinterpret_cast<const float*>(device.allocate(sizeof(float) * floats, "reads"));
    std::vector<float> sums(pieces);
    const double seconds = best_seconds(8, [&] {
        cpu::parallel_for(threads, pieces, [&](std::int64_t piece) {
            const float* const values = from + piece * (floats / pieces);
            sums[static_cast<std::size_t>(piece)] =
                cpu::lane_sum<float>(floats / pieces, [=](std::int64_t i) { return values[i]; });
        });
    });
    return sizeof(float) * static_cast<double>(floats) / seconds;
}

}  // namespace llmc::bench
