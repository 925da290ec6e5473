// Attention's forward kernels against the CPU device.
#include "llmc/device/cuda/attention_forward.cuh"
#include "llmc/core/error.h"
#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

using llmc::cuda::AttentionSizes;

// Tiles of 64 keys and of 64 or 128 queries, padded to 64 or 128 columns: whole ones, and with an extra row
// or chunk.
const std::vector<AttentionSizes> attention_shapes = {{1, 70, 1, 24},  {1, 1, 1, 64},  {1, 129, 2, 64},
                                                      {1, 64, 1, 64},  {2, 65, 1, 8},  {1, 128, 1, 128},
                                                      {1, 193, 1, 72}, {2, 33, 2, 120}};
const std::vector<AttentionSizes> attention_shapes_for_races = {{1, 70, 1, 24}, {1, 66, 1, 72}};

template <class X>
struct Attention {
    explicit Attention(const AttentionSizes& s)
        : sizes(s), qkv(3 * elements()), out(elements()), lse(s.all_heads() * s.sequence) {}

    void run(const LaunchContext& on) {
        llmc::cuda::attention_forward(on, out.data(), lse.data(), qkv.data(), sizes);
        synchronize();
    }
    void run_on_cpu() {
        const std::int64_t b = sizes.batch, t = sizes.sequence, nh = sizes.heads, hs = sizes.head_size;
        const std::size_t bytes = cpu().workspace_bytes({b, t, nh * hs, nh, nh * hs, 1, llmc::DType::fp32});
        Array<float> workspace(static_cast<std::int64_t>(bytes / sizeof(float)));
        cpu().set_workspace(tensor(workspace, {workspace.size()}));
        cpu().attention_forward(tensor(out, {b, t, nh, hs}), tensor(lse, {b, nh, t}),
                                tensor(qkv, {b, t, 3, nh, hs}));
        cpu().set_workspace({});
    }
    std::int64_t elements() const { return sizes.all_heads() * sizes.sequence * sizes.head_size; }
    double part(std::int64_t head, int t, int which, int c) const {
        const std::int64_t b = head / sizes.heads, h = head % sizes.heads;
        return to_float(
            qkv[(((b * sizes.sequence + t) * 3 + which) * sizes.heads + h) * sizes.head_size + c]);
    }

    AttentionSizes sizes;
    Array<X> qkv, out;
    Array<float> lse;
};

template <class X>
void compare(Comparison& comparison, const Attention<X>& got, const Attention<X>& wanted) {
    constexpr double u = lab::unit_roundoff<float>;
    const AttentionSizes& s = got.sizes;
    for (std::int64_t head = 0; head < s.all_heads(); ++head) {
        double longest_key = 0;
        std::vector<double> largest_value(static_cast<std::size_t>(s.head_size));
        for (int t = 0; t < s.sequence; ++t) {
            double query = 0, key = 0;
            for (int c = 0; c < s.head_size; ++c) {
                query += std::pow(wanted.part(head, t, 0, c), 2);
                key += std::pow(wanted.part(head, t, 1, c), 2);
                double& value = largest_value[static_cast<std::size_t>(c)];
                value = std::max(value, std::fabs(wanted.part(head, t, 2, c)));
            }
            longest_key = std::max(longest_key, std::sqrt(key));
            // A score is the sum of HS products. Their magnitudes sum to at most `score` (Cauchy-Schwarz). It
            // has HS roundings, which tensor cores do by truncation (2 u each). It also has a few roundings
            // from the scale, and a few from the difference to the maximum, which is up to twice `score`. A
            // power has an error of 2 ulp. So has each factor of a new maximum; there is at most one per 32
            // keys.
            const double n = t + 1, score = std::sqrt(query) * longest_key / std::sqrt(s.head_size);
            const double weight_error = std::expm1((2 * s.head_size + 10) * u * score + 5 * u * (n / 32 + 2));
            const std::int64_t row = head * s.sequence + t;
            comparison.see("lse", row, got.lse[row], wanted.lse[row],
                           2 * (weight_error + n * u + 5 * u * (std::log(n) + score)));
            for (int c = 0; c < s.head_size; ++c) {
                // Weights sum to 1, so sum_j p_j |v_j| is at most the largest |v_j|. In bf16 the kernel
                // rounds its weights to bf16; the CPU does not. The remaining errors are those of sums of n
                // terms and of a division.
                const double value = largest_value[static_cast<std::size_t>(c)];
                const double rounding = std::is_same_v<X, bf16> ? lab::unit_roundoff<bf16> : 0;
                const std::int64_t i =
                    ((head / s.heads * s.sequence + t) * s.heads + head % s.heads) * s.head_size + c;
                const double error = value * (2 * weight_error + (3 * n + 4) * u);
                const double expected = to_float(wanted.out[i]);
                comparison.see(
                    "out", i, to_float(got.out[i]), expected,
                    lab::rounded<X>(expected, error) + lab::rounded<X>(expected, error + value * rounding));
            }
        }
    }
}

template <class X>
class AttentionForward : public Kernels<X> {};
TYPED_TEST_SUITE(AttentionForward, Dtypes);

template <class X>
void check_forward(const std::vector<AttentionSizes>& all, double deviation) {
    for (const AttentionSizes& sizes : all) {
        Draw draw(seed());
        Attention<X> wanted(sizes);
        draw.normal(wanted.qkv, deviation);
        wanted.run_on_cpu();
        for (const auto& on : contexts_of_all_tilings()) {
            Attention<X> got(sizes);
            got.qkv.copy_from(wanted.qkv);
            got.run(on);
            Comparison comparison;
            compare(comparison, got, wanted);
            EXPECT_TRUE(comparison.good()) << "T=" << sizes.sequence << " HS=" << sizes.head_size << " sm_"
                                           << on.chip.architecture << ": " << comparison.first_failure();
        }
    }
}

TYPED_TEST(AttentionForward, OrdinaryScores) {
    check_forward<TypeParam>(shapes(attention_shapes, attention_shapes_for_races), 1);
}
// The softmax selects one or two scores, and the maximum changes often.
TYPED_TEST(AttentionForward, SteepScores) { check_forward<TypeParam>({{1, 140, 1, 32}}, 4); }

// Powers would overflow if the maximum were not subtracted from the scores.
TYPED_TEST(AttentionForward, EnormousScores) { check_forward<TypeParam>({{1, 70, 1, 64}}, 10); }

TYPED_TEST(AttentionForward, SameBitsEachTime) {
    const AttentionSizes sizes{1, 66, 1, 40};
    for (const auto& on : launch_contexts()) {
        Draw draw(seed());
        Attention<TypeParam> first(sizes), second(sizes);
        draw.normal(first.qkv, 1);
        second.qkv.copy_from(first.qkv);
        first.run(on);
        second.run(on);
        EXPECT_EQ(std::memcmp(first.out.data(), second.out.data(), first.out.bytes()), 0);
        EXPECT_EQ(std::memcmp(first.lse.data(), second.lse.data(), first.lse.bytes()), 0);
    }
}

TYPED_TEST(AttentionForward, RefusesOtherHeadSizes) {
    for (const int head_size : {4, 20, 136}) {
        Attention<TypeParam> attention({1, 2, 1, head_size});
        EXPECT_THROW(attention.run(launch_contexts().front()), llmc::ProgrammingError);
    }
}

}  // namespace
}  // namespace kernel_test
