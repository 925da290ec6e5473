// Attention's forward kernels against the CPU device.
#include "llmc/device/cuda/attention_forward.cuh"
#include "llmc/core/error.h"
#include "llmc/device/heads.h"
#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

using llmc::cuda::AttentionSizes;

// Tiles of 64 keys and of 64 or 128 queries, padded to 64 or 128 columns: whole ones, and with an extra row
// or chunk. Then key heads that query heads share, and windows: of one key, within a tile, across tiles, of
// whole tiles, and as long as the sequence.
const std::vector<AttentionSizes> attention_shapes = {
    {1, 70, 1, 24},         {1, 1, 1, 64},         {1, 129, 2, 64},       {1, 64, 1, 64},
    {2, 65, 1, 8},          {1, 128, 1, 128},      {1, 193, 1, 72},       {2, 33, 2, 120},
    {2, 40, 4, 16, 2},      {1, 70, 3, 128, 1},    {1, 140, 1, 24, 1, 1}, {1, 200, 2, 64, 1, 67},
    {1, 193, 1, 72, 1, 64}, {1, 190, 1, 16, 1, 9}, {1, 66, 2, 8, 2, 66}};
const std::vector<AttentionSizes> attention_shapes_for_races = {
    {1, 70, 1, 24}, {1, 66, 1, 72}, {1, 140, 2, 24, 1, 40}};

// The places of q, k and v: one after the other in rows of one tensor, or each in a tensor of its own,
// between elements of others.
enum class Places { packed, apart };

template <class X>
struct Attention {
    explicit Attention(const AttentionSizes& s, Places where = Places::packed)
        : sizes(s),
          places(where),
          q(rows() * row_of_q()),
          k(rows() * row_of_k()),
          v(rows() * row_of_v()),
          out(rows() * s.heads * s.head_size),
          lse(s.all_heads() * s.sequence) {}

    void draw(Draw& draw, double deviation) {
        for (Array<X>* array : {&q, &k, &v}) draw.normal(*array, deviation);
    }
    void copy_inputs_from(const Attention& other) {
        q.copy_from(other.q);
        k.copy_from(other.k);
        v.copy_from(other.v);
    }
    void run(const LaunchContext& on, int block_threads = 128) {
        llmc::cuda::attention_forward(on, out.data(), lse.data(), heads(), sizes, block_threads);
        synchronize();
    }
    llmc::cuda::QueryKeyValue<const X> heads() const {
        if (places == Places::packed) return llmc::cuda::packed_heads(q.data(), sizes);
        return {{q.data() + 16, to_int(row_of_q())},
                {k.data(), to_int(row_of_k())},
                {v.data() + 8, to_int(row_of_v())}};
    }
    void run_on_cpu() {
        const std::int64_t b = sizes.batch, t = sizes.sequence, h = sizes.heads, d = sizes.head_size;
        const std::size_t bytes =
            cpu_sizes().workspace_bytes({b, t, h * d, h, h * d, 1, llmc::DType::fp32, 0, d});
        Array<float> workspace(static_cast<std::int64_t>(bytes / sizeof(float)));
        cpu().set_workspace(tensor(workspace, {workspace.size()}));
        const std::int64_t kept = sizes.key_heads;
        const llmc::Tensor rows_of_q = tensor(q, {rows(), row_of_q()});
        const llmc::PackedHeads all = places == Places::packed
                                          ? llmc::packed_heads(rows_of_q, h, kept, d)
                                          : llmc::PackedHeads{{rows_of_q, 16, h, d},
                                                              {tensor(k, {rows(), row_of_k()}), 0, kept, d},
                                                              {tensor(v, {rows(), row_of_v()}), 8, kept, d}};
        cpu().run(llmc::AttentionForward{tensor(out, {b, t, h, d}), tensor(lse, {b, h, t}), all.q, all.k,
                                         all.v, sizes.window});
        cpu().set_workspace({});
    }
    // An element of query head `head`, or of the keys (1) or values (2) that it reads.
    double part(std::int64_t head, int t, int which, int c) const {
        const std::int64_t b = head / sizes.heads, h = head % sizes.heads;
        const std::int64_t place = (which == 0 ? h : h * sizes.key_heads / sizes.heads) * sizes.head_size + c;
        const auto all = heads();
        const auto& of_part = which == 0 ? all.q : which == 1 ? all.k : all.v;
        return to_float(of_part.first[(b * sizes.sequence + t) * of_part.stride + place]);
    }

    std::int64_t rows() const { return sizes.batch * sizes.sequence; }
    std::int64_t row_of_q() const {
        const std::int64_t heads = sizes.heads + (places == Places::packed ? 2 * sizes.key_heads : 0);
        return heads * sizes.head_size + (places == Places::packed ? 0 : 24);
    }
    // Packed rows leave these arrays with one element per row, which nothing reads.
    std::int64_t row_of_k() const {
        return places == Places::packed ? 1 : std::int64_t{sizes.key_heads} * sizes.head_size + 8;
    }
    std::int64_t row_of_v() const {
        return places == Places::packed ? 1 : std::int64_t{sizes.key_heads} * sizes.head_size + 16;
    }
    static int to_int(std::int64_t n) { return static_cast<int>(n); }

    AttentionSizes sizes;
    Places places;
    Array<X> q, k, v, out;
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
            const double n = std::min(t + 1, s.window),
                         score = std::sqrt(query) * longest_key / std::sqrt(s.head_size);
            const double weight_error = std::expm1((2 * s.head_size + 10) * u * score + 5 * u * (n / 32 + 2));
            const std::int64_t row = head * s.sequence + t;
            comparison.see("lse", row, got.lse[row], wanted.lse[row],
                           2 * (weight_error + n * u + 5 * u * (std::log(n) + score)));
            for (int c = 0; c < s.head_size; ++c) {
                // Weights sum to 1, so sum_j p_j |v_j| is at most the largest |v_j|. The kernel for tensor cores
                // rounds its weights, of which the greatest is 1; the CPU does not. The remaining errors are those
                // of sums of n terms and of a division.
                const double value = largest_value[static_cast<std::size_t>(c)];
                const double rounding =
                    lab::rounding_of_weights<X>.error(1) + n * lab::rounding_of_weights<X>.absolute;
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
void check_forward(const std::vector<AttentionSizes>& all, double deviation, Places places = Places::packed,
                   int block_threads = 128) {
    for (const AttentionSizes& sizes : all) {
        Draw draw(seed());
        Attention<X> wanted(sizes, places);
        wanted.draw(draw, deviation);
        wanted.run_on_cpu();
        for (const auto& on : contexts_of_all_tilings()) {
            Attention<X> got(sizes, places);
            got.copy_inputs_from(wanted);
            got.run(on, block_threads);
            Comparison comparison;
            compare(comparison, got, wanted);
            EXPECT_TRUE(comparison.good()) << "T=" << sizes.sequence << " D=" << sizes.head_size
                                           << " K=" << sizes.key_heads << " window=" << sizes.window << " sm_"
                                           << on.chip.architecture << ": " << comparison.first_failure();
        }
    }
}

TYPED_TEST(AttentionForward, OrdinaryScores) {
    check_forward<TypeParam>(shapes(attention_shapes, attention_shapes_for_races), 1);
}
TYPED_TEST(AttentionForward, BlocksOfEightWarps) {
    check_forward<TypeParam>({{1, 140, 2, 24, 1, 40}, {1, 130, 1, 72}}, 1, Places::packed, 256);
}
TYPED_TEST(AttentionForward, HeadsInTensorsOfTheirOwn) {
    check_forward<TypeParam>({{2, 70, 4, 24, 2, 40}, {1, 40, 2, 72}}, 1, Places::apart);
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
        first.draw(draw, 1);
        second.copy_inputs_from(first);
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
