// The choices and refusals of launchers, and numbers beyond those that test/python/test_ops.py compares.
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "llmc/device/cuda/bias_gradient.cuh"
#include "llmc/device/cuda/checksum.h"
#include "llmc/device/cuda/classifier.cuh"
#include "llmc/device/cuda/gelu.cuh"
#include "llmc/device/cuda/head_norm_forward.cuh"
#include "llmc/device/cuda/norm_backward.cuh"
#include "llmc/device/cuda/norm_forward.cuh"
#include "llmc/device/cuda/swiglu.cuh"
#include "llmc/device/cuda/update.cuh"
#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

using llmc::cuda::from_float;

template <class X>
class Launchers : public Kernels<X> {};
TYPED_TEST_SUITE(Launchers, Dtypes);

TYPED_TEST(Launchers, RefuseBlocksThatAreTooLarge) {
    using X = TypeParam;
    const LaunchContext on = launch_contexts().front();
    Array<X> x(1 << 14);
    Array<float> numbers(64);
    Array<std::int32_t> targets(1);
    const X* const none = nullptr;
    float* const of_rows = numbers.data();
    EXPECT_THROW(llmc::cuda::swiglu_forward(on, x.data(), x.data(), 1, 8, 1024), llmc::ProgrammingError);
    EXPECT_THROW((llmc::cuda::norm_forward<false, X>(on, nullptr, x.data(), nullptr, of_rows, x.data(), none,
                                                     none, none, 1e-5f, 1, 8, 512)),
                 llmc::ProgrammingError);
    EXPECT_THROW((llmc::cuda::norm_backward<true, X>(on, x.data(), of_rows, of_rows, x.data(), x.data(), none,
                                                     of_rows, of_rows, 1, 8, numbers.data(), 512)),
                 llmc::ProgrammingError);
    EXPECT_THROW(llmc::cuda::head_norm_forward<X>(on, {x.data(), 16}, of_rows, {x.data(), 16}, none, 1e-5f,
                                                  {nullptr, 0, 16.0f}, 1, 1, 16, 416),
                 llmc::ProgrammingError);
    // A grid without blocks would leave the logits unchanged.
    EXPECT_THROW(llmc::cuda::fused_classifier(on, x.data(), of_rows, targets.data(), 1, 1 << 14, 1 << 14, 1,
                                              true, {}, 2048),
                 llmc::ProgrammingError);
}

TEST(UpdateLauncher, RefusesSegmentsThatItCannotTake) {
    constexpr std::int64_t n = 64;
    Array<llmc::cuda::bf16> parameters(n);
    Array<float> w(n), m(n), v(n), gradients(n);
    Array<double> norm_squared(1);
    Array<llmc::StepNumbers<llmc::AdamW>> numbers(1);
    const auto update = [&](const std::vector<llmc::UpdateSegment>& segments,
                            const std::optional<llmc::StochasticRounding>& rounding = {}) {
        const llmc::cuda::UpdateBuffers<llmc::AdamW, llmc::cuda::bf16, float, float, float> buffers{
            parameters.data(), w.data(), {m.data(), v.data()}, gradients.data()};
        llmc::cuda::update(launch_contexts().front(), buffers, norm_squared.data(), numbers.data(), segments,
                           rounding);
    };
    EXPECT_THROW(update({{8, 16, 0}, {0, 8, 0}}), llmc::ProgrammingError);
    EXPECT_THROW(update(std::vector<llmc::UpdateSegment>(17, {0, 0, 0})), llmc::ProgrammingError);
    EXPECT_THROW(update({{0, 64, 0}}, llmc::StochasticRounding{1, 2}), llmc::ProgrammingError);
}

TYPED_TEST(Launchers, WorkspaceOfABiasIsEnoughForFewerColumns) {
    using X = TypeParam;
    for (const auto& on : launch_contexts()) {
        for (const std::int64_t rows : {1, 300, 5000, 100000}) {
            for (const int most : {64, 768, 3200}) {
                const auto enough = llmc::cuda::bias_gradient_workspace_bytes_up_to<X>(on.chip, rows, most);
                for (int columns = 8; columns <= most; columns += 8) {
                    ASSERT_LE(llmc::cuda::bias_gradient_workspace_bytes<X>(on.chip, rows, columns), enough);
                }
            }
        }
    }
}

// The loss and dlogits of one row of a vocabulary of 300.
template <class X>
struct Row {
    static constexpr int vocabulary = 300, columns = 384;

    explicit Row(float logit, int target) : logits(columns), loss(1), targets(1) {
        logits.fill(from_float<X>(logit));
        targets[0] = target;
    }
    void classify() {
        llmc::cuda::fused_classifier(launch_contexts().front(), logits.data(), loss.data(), targets.data(), 1,
                                     columns, vocabulary, 1, true);
        synchronize();
    }

    Array<X> logits;
    Array<float> loss;
    Array<std::int32_t> targets;
};

// The exponential of the largest logit alone would overflow. A logit of minus infinity has probability 0,
// also if a thread has no other logits.
TYPED_TEST(Launchers, ClassifierOfInfiniteLogits) {
    using X = TypeParam;
    Row<X> row(-INFINITY, 299);
    row.logits[150] = row.logits[299] = from_float<X>(1024);
    row.classify();
    EXPECT_NEAR(row.loss[0], std::log(2.0), 1024 * 4 * lab::unit_roundoff<float>);
    for (int v = 0; v < row.columns; ++v)
        EXPECT_EQ(to_float(row.logits[v]), v == 150 ? 0.5f : v == 299 ? -0.5f : 0.0f) << v;
}

// The largest logits that are allowed (ExponentialSum::none) or that X has.
TYPED_TEST(Launchers, ClassifierOfTheGreatestLogits) {
    using X = TypeParam;
    const float greatest = std::is_same_v<X, llmc::cuda::fp16> ? 65504.0f : 1e9f;
    for (const float size : {-greatest, greatest}) {
        Row<X> row(size, 7);
        row.classify();
        EXPECT_TRUE(std::isfinite(row.loss[0]));  // log(300) is less than the last place of the logits
        Comparison comparison;
        for (int v = 0; v < row.vocabulary; ++v) {
            const double expected = 1.0 / row.vocabulary - (v == 7);
            comparison.see("dlogits", v, to_float(row.logits[v]), expected,
                           lab::rounded<X>(expected, 300 * lab::unit_roundoff<float> * std::fabs(expected)));
        }
        EXPECT_TRUE(comparison.good()) << comparison.first_failure();
    }
}

// GELU'(x) is 1 or 0 at infinity, where x and the slope are infinite and e^-|w| is 0.
TYPED_TEST(Launchers, GeluHasADerivativeAtInfinity) {
    using X = TypeParam;
    constexpr std::int64_t n = 8;
    Array<X> in(n), dout(n), din(n);
    dout.fill(from_float<X>(3));
    for (std::int64_t i = 0; i < n; ++i) in[i] = from_float<X>(i % 2 == 0 ? INFINITY : -INFINITY);
    llmc::cuda::gelu_backward(launch_contexts().front(), din.data(), dout.data(), in.data(), n);
    synchronize();
    for (std::int64_t i = 0; i < n; ++i) EXPECT_EQ(to_float(din[i]), i % 2 == 0 ? 3.0f : 0.0f);
}

// A row of bf16 or fp16 is read once: a block's shared memory holds all of it.
TEST(ClassifierLauncher, KeepsARowInSharedMemory) {
    struct SharedBytes : llmc::cuda::LaunchObserver {
        void launched(const llmc::cuda::LaunchRecord& record) override {
            of_a_block = record.dynamic_shared_bytes;
        }
        std::size_t of_a_block = 0;
    };
    constexpr int vocabulary = 50257, columns = 50304;
    Array<llmc::cuda::bf16> logits(2 * columns);
    Array<float> losses(2);
    Array<std::int32_t> targets(2);
    logits.fill(from_float<llmc::cuda::bf16>(0));
    targets[0] = targets[1] = 0;
    for (LaunchContext on : shapes(launch_contexts())) {
        SharedBytes shared;
        on.observer = &shared;
        llmc::cuda::fused_classifier(on, logits.data(), losses.data(), targets.data(), 2, columns, vocabulary,
                                     1, false);
        synchronize();
        EXPECT_GE(shared.of_a_block, vocabulary * sizeof(llmc::cuda::bf16));
    }
}

TEST(Checksum, IsOfEveryBitAndPlace) {
    Draw draw(seed());
    Array<std::uint64_t> sum(1);
    for (const auto& on : launch_contexts()) {
        for (const std::int64_t packs : {1, 37, 3000}) {  // the last in several blocks
            Array<std::uint64_t> x(2 * packs);
            for (std::int64_t i = 0; i < 2 * packs; ++i)
                x[i] = static_cast<std::uint64_t>(draw.below(1 << 30)) << 32 | draw.below(1 << 30);
            const auto checksum = [&](std::uint64_t before = 0) {
                sum[0] = before;
                llmc::cuda::add_checksum(on, reinterpret_cast<unsigned long long*>(sum.data()), x.data(),
                                         16 * packs);
                synchronize();
                return sum[0];
            };
            const std::uint64_t whole = checksum();
            EXPECT_EQ(checksum(), whole);
            EXPECT_EQ(checksum(whole), 2 * whole);
            std::uint64_t& place = x[draw.below(2 * packs)];
            const std::uint64_t bit = std::uint64_t{1} << draw.below(64);
            place ^= bit;
            EXPECT_NE(checksum(), whole);
            place ^= bit;
            if (packs == 1) continue;
            std::swap(x[0], x[2 * packs - 2]);
            std::swap(x[1], x[2 * packs - 1]);
            EXPECT_NE(checksum(), whole) << "of other places";
        }
    }
}

}  // namespace
}  // namespace kernel_test
