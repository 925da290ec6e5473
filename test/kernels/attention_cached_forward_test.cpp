// The kernel of attention with a cache, compared with the CPU device.
#include "llmc/device/cuda/attention_cached_forward.cuh"
#include "llmc/core/error.h"
#include "llmc/device/heads.h"
#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

using llmc::cuda::CachedAttentionSizes;

// Heads of up to 32, 64 and 128 channels, both whole and with one chunk. Some have fewer keys than a warp's
// groups take, some more than the block has in flight. Then key heads that query heads share, and windows.
const std::vector<CachedAttentionSizes> cached_shapes = {
    {1, 70, 2, 24},    {1, 0, 1, 64},       {3, 0, 1, 8},          {1, 300, 1, 64},
    {5, 33, 2, 72},    {2, 127, 1, 128},    {1, 40, 3, 32},        {3, 40, 4, 24, 2},
    {2, 70, 3, 64, 1}, {3, 20, 2, 8, 1, 1}, {4, 90, 2, 72, 2, 37}, {2, 30, 2, 16, 1, 100}};
const std::vector<CachedAttentionSizes> cached_shapes_for_races = {
    {2, 70, 1, 24}, {2, 5, 1, 64}, {2, 30, 1, 120}, {2, 40, 2, 24, 1, 30}};

constexpr int unused_rows = 2;  // rows of the cache after the new ones

template <class X>
struct Cached {
    explicit Cached(const CachedAttentionSizes& s)
        : sizes(s),
          cache(2 * capacity() * channels()),
          qkv(s.rows * row()),
          out(std::int64_t{s.rows} * s.heads * s.head_size) {}

    void draw(Draw& draw, double deviation) {
        draw.normal(cache, deviation);
        draw.normal(qkv, deviation);
    }
    void copy_inputs_from(const Cached& other) {
        cache.copy_from(other.cache);
        qkv.copy_from(other.qkv);
    }
    void run(const LaunchContext& on) {
        llmc::cuda::attention_cached_forward(
            on, out.data(), cache.data(),
            llmc::cuda::packed_heads<const X>(qkv.data(), sizes.heads, sizes.key_heads, sizes.head_size),
            sizes);
        synchronize();
    }
    void run_on_cpu() {
        const std::int64_t n = sizes.rows, h = sizes.heads, kept = sizes.key_heads, d = sizes.head_size;
        const std::size_t bytes =
            cpu_sizes().workspace_bytes({1, capacity(), h * d, h, h * d, 1, llmc::DType::fp32});
        Array<float> workspace(static_cast<std::int64_t>(bytes / sizeof(float)));
        cpu().set_workspace(tensor(workspace, {workspace.size()}));
        const auto [q, k, v] = llmc::packed_heads(tensor(qkv, {n, row()}), h, kept, d);
        cpu().run(llmc::AttentionCachedForward{tensor(out, {n, h, d}),
                                               tensor(cache, {capacity(), 2, kept, d}), q, k, v,
                                               sizes.position, sizes.window});
        cpu().set_workspace({});
    }
    std::int64_t capacity() const { return sizes.position + sizes.rows + unused_rows; }
    // Elements of a row of the cache's keys.
    std::int64_t channels() const { return std::int64_t{sizes.key_heads} * sizes.head_size; }
    std::int64_t row() const { return std::int64_t{sizes.heads} * sizes.head_size + 2 * channels(); }
    // Key (part 0) or value (part 1) that query head `head` reads in a row of the cache.
    double kept(int row, int part, int head, int c) const {
        const std::int64_t key_head = head * sizes.key_heads / sizes.heads;
        return to_float(cache[(2 * row + part) * channels() + key_head * sizes.head_size + c]);
    }

    CachedAttentionSizes sizes;
    Array<X> cache, qkv, out;
};

template <class X>
void compare(Comparison& comparison, const Cached<X>& got, const Cached<X>& wanted) {
    constexpr double u = lab::unit_roundoff<float>;
    const CachedAttentionSizes& s = got.sizes;
    for (std::int64_t i = 0; i < got.cache.size(); ++i)
        comparison.see_equal("cache", i, to_float(got.cache[i]), to_float(wanted.cache[i]));
    for (int row = 0; row < s.rows; ++row) {
        for (int head = 0; head < s.heads; ++head) {
            const int end = s.position + row + 1, first = std::max(0, end - s.window);
            double query = 0, longest_key = 0;
            for (int c = 0; c < s.head_size; ++c)
                query += std::pow(to_float(wanted.qkv[row * wanted.row() + head * s.head_size + c]), 2);
            for (int j = first; j < end; ++j) {
                double key = 0;
                for (int c = 0; c < s.head_size; ++c) key += std::pow(wanted.kept(j, 0, head, c), 2);
                longest_key = std::max(longest_key, std::sqrt(key));
            }
            // Derived as in attention_forward_test.cpp, but no tensor core truncates and weights are not
            // rounded to bf16. A weight's error comes from its score: HS roundings, some of the scale, and
            // some of the difference from the maximum. It also comes from a factor for each new maximum, at
            // most one per key.
            const double n = end - first, score = std::sqrt(query) * longest_key / std::sqrt(s.head_size);
            const double weight_error = std::expm1((s.head_size + 10) * u * score + 5 * u * (n + 8));
            for (int c = 0; c < s.head_size; ++c) {
                double largest = 0;
                for (int j = first; j < end; ++j)
                    largest = std::max(largest, std::fabs(wanted.kept(j, 1, head, c)));
                const std::int64_t i = (std::int64_t{row} * s.heads + head) * s.head_size + c;
                const double error = largest * (2 * weight_error + (3 * n + 4) * u);
                const double expected = to_float(wanted.out[i]);
                comparison.see("out", i, to_float(got.out[i]), expected, twice_rounded<X>(expected, error));
            }
        }
    }
}

template <class X>
class AttentionCachedForward : public Kernels<X> {};
TYPED_TEST_SUITE(AttentionCachedForward, Dtypes);

template <class X>
void check_cached(const std::vector<CachedAttentionSizes>& all, double deviation) {
    for (const CachedAttentionSizes& sizes : all) {
        Draw draw(seed());
        Cached<X> given(sizes), wanted(sizes);
        given.draw(draw, deviation);
        wanted.copy_inputs_from(given);
        wanted.run_on_cpu();
        for (const auto& on : launch_contexts()) {
            Cached<X> got(sizes);
            got.copy_inputs_from(given);
            got.run(on);
            Comparison comparison;
            compare(comparison, got, wanted);
            EXPECT_TRUE(comparison.good())
                << sizes.rows << " rows behind " << sizes.position << ", D=" << sizes.head_size
                << " K=" << sizes.key_heads << " window=" << sizes.window << " sm_" << on.chip.architecture
                << ": " << comparison.first_failure();
        }
    }
}

TYPED_TEST(AttentionCachedForward, OrdinaryScores) {
    check_cached<TypeParam>(shapes(cached_shapes, cached_shapes_for_races), 1);
}
// The maximum changes often. Powers would overflow if it were not subtracted from the scores.
TYPED_TEST(AttentionCachedForward, EnormousScores) { check_cached<TypeParam>({{1, 90, 1, 64}}, 10); }

TYPED_TEST(AttentionCachedForward, SameBitsEachTime) {
    const CachedAttentionSizes sizes{2, 66, 1, 40};
    for (const auto& on : launch_contexts()) {
        Draw draw(seed());
        Cached<TypeParam> first(sizes), second(sizes);
        first.draw(draw, 1);
        second.copy_inputs_from(first);
        first.run(on);
        second.run(on);
        EXPECT_EQ(std::memcmp(first.out.data(), second.out.data(), first.out.bytes()), 0);
    }
}

TYPED_TEST(AttentionCachedForward, RefusesOtherHeadSizes) {
    for (const int head_size : {4, 20, 136}) {
        Cached<TypeParam> cached({1, 2, 1, head_size});
        EXPECT_THROW(cached.run(launch_contexts().front()), llmc::ProgrammingError);
    }
}

}  // namespace
}  // namespace kernel_test
