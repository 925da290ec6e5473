// Bytes that tensor-parallel ranks send for a block and micro-batch, against the formulas. The unit is the
// product `a f`. Its factor a is the bytes of the residual stream (B T C numbers), and f = (R - 1)/R for R
// ranks.
//
// Each of the two sums of a forward pass is a reduce-scatter and a gather, each a f: 4 a f together. The
// backward pass sends as much. With sequence parallelism, the reduce-scatters come after products, and the
// gathers before them. The backward pass then gathers both layernorms' outputs again, for the gradients of
// weights: 10 a f. Recomputing a block repeats its forward pass up to the last product: one more sum, and
// with sequence parallelism one more gather. A zero-bubble schedule gathers the gradients of both sums in
// each part of the backward pass.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "llmc/plan/run_plan.h"
#include "test/gpt2_config.h"

namespace llmc {
namespace {

using enum RecomputeKind;

constexpr std::int64_t B = 3, T = 32, C = 128, m = 4;

class TensorBytes : public testing::Test {
  protected:
    // Bytes that a rank of the first stage, which has this many layers, sends in a step.
    std::int64_t sent(std::int64_t layers, const Mesh& mesh, PipelineSchedule schedule,
                      const Recompute& recompute, DType dtype) {
        const bool has_stages = mesh.pipeline > 1;
        const RunSpec spec{
            .model = gpt2({.layers = layers + (has_stages ? 1 : 0),
                           .heads = 4,
                           .channels = C,
                           .sequence_length = T,
                           .vocabulary = 256}),
            .dtype = dtype,
            .mesh = mesh,
            .pipeline_schedule = schedule,
            .pipeline_layers = has_stages ? fmt::format("{},1", layers) : "",
            .recompute = recompute,
            .global_batch_tokens = m * B * T,
            .micro_batch_sequences = B,
        };
        return static_cast<std::int64_t>(plan_run(spec, device_->sizes(), 0).sent.tensor);
    }

  private:
    std::unique_ptr<Device> device_ = make_cpu_device(1);
};

TEST_F(TensorBytes, OfABlockAreThoseOfTheFormulas) {
    struct Case {
        RecomputeKind recompute;
        bool is_zero_bubble;
        int whole_tokens, divided_tokens;  // a f
    };
    for (const auto& [recompute, is_zero_bubble, whole, divided] :
         {Case{none, false, 8, 10}, Case{selective, false, 8, 10}, Case{block, false, 8 + 2, 10 + 3},
          Case{none, true, 8, 12}, Case{selective, true, 8, 10}, Case{block, true, 8 + 2, 10 + 3}}) {
        for (const int ranks : {2, 4}) {
            for (const bool divides : {false, true}) {
                for (const DType dtype : {DType::fp32, DType::bf16}) {
                    const Mesh mesh{
                        .pipeline = is_zero_bubble ? 2 : 1, .tensor = ranks, .sequence_parallel = divides};
                    const auto schedule =
                        is_zero_bubble ? PipelineSchedule::zb_h1 : PipelineSchedule::one_f_one_b;
                    const auto of = [&, recompute = recompute](std::int64_t layers) {
                        return sent(layers, mesh, schedule, {.kind = recompute}, dtype);
                    };
                    const auto element = static_cast<std::int64_t>(size_of(dtype));
                    const std::int64_t af = B * T * C * element / ranks * (ranks - 1);
                    // Gradients in fp32 that each rank computes from its own tokens, once a step: two
                    // layernorms, two biases.
                    const std::int64_t sums = divides ? 2 * 6 * C * 4 / ranks * (ranks - 1) : 0;
                    EXPECT_EQ(of(3) - of(2), m * (divides ? divided : whole) * af + sums)
                        << name_of(recompute) << ", " << ranks << " ranks"
                        << (divides ? ", tokens divided" : "") << (is_zero_bubble ? ", zb-h1" : "");
                }
            }
        }
    }
}

}  // namespace
}  // namespace llmc
