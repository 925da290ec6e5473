// All ranks find a fault in the state of one rank, and one message names it. The faults are a gradient that
// is not finite, and a replica that differs.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/device/device.h"
#include "llmc/parallel/step/executor.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/diagnosis.h"
#include "mpi_test.h"
#include "test/gpt2_units.h"
#include "trainer_run.h"

namespace llmc {
namespace {

using test::world;

constexpr GPTConfig config{.layers = 2, .heads = 2, .channels = 20, .sequence_length = 7, .vocabulary = 37};

// A model and its weights, on which training steps can be made.
class Model {
  public:
    explicit Model(const Sharding& sharding, int stages = 1)
        : mesh_{.pipeline = stages, .sharding = sharding, .rank = world().rank()},
          plan_(plan_run({.model = gpt2(config),
                          .dtype = DType::bf16,
                          .mesh = mesh_,
                          .global_batch_tokens = 2 * sharding.ranks() * config.sequence_length,
                          .micro_batch_sequences = 1},
                         device_->sizes(), 0)),
          arenas_(*device_, plan_.memory),
          store_(*device_, arenas_, plan_.store, 0.1, mesh_.shard()),
          groups_(world(), mesh_, plan_.parts),
          executor_(*plan_.lists, *device_, groups_, store_, bind(plan_.activations, arenas_), 2, true) {
        device_->ops().set_workspace(arenas_[plan_.workspace]);
        store_.initialize(1);
        executor_.run(plan_.parameter_gathers, {});
    }

    StepResults step(float loss_scale) {
        const auto load = [](int, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
            for (std::size_t i = 0; i < inputs.size(); ++i) {
                inputs[i] = static_cast<std::int32_t>(7 * i % 37);
                targets[i] = static_cast<std::int32_t>(3 * i % 37);
            }
        };
        executor_.run(plan_.training, {.load = load, .sequences = 1, .loss_scale = loss_scale});
        const StepResults results = executor_.results();
        executor_.run(plan_.update, {.update = Update{.step = {1, 1e-3, {0.9, 0.95, 1e-8}, 1.0}}});
        return results;
    }

    std::string first_non_finite() {
        const ForwardPasses as_it_is{1, [](int, const Step&) {}};
        return llmc::first_non_finite(plan_, arenas_, *device_, store_, world(), as_it_is);
    }
    std::optional<std::string> difference() { return differing_replica(store_, world()); }
    const ParameterStore& store() const { return store_; }

  private:
    std::unique_ptr<Device> device_ = make_cpu_device(1);
    Mesh mesh_;
    RunPlan plan_;
    Arenas arenas_;
    ParameterStore store_;
    MeshGroups groups_;
    Executor executor_;
};

std::vector<Sharding> all_shardings() {
    const int ranks = world().size();
    std::vector<Sharding> all;
    for (int stage = 0; stage <= (ranks > 1 ? 3 : 0); ++stage)
        all.push_back({.stage = stage, .shards = ranks, .reduces_each_micro_batch = stage >= 2});
    if (ranks % 2 == 0 && ranks > 2)
        all.push_back({.stage = 3, .shards = 2, .replicas = ranks / 2, .reduces_each_micro_batch = true});
    return all;
}

TEST(NonFiniteGradient, OfOneRankIsSeenByAllAndChangesNothing) {
    for (const Sharding& sharding : all_shardings()) {
        SCOPED_TRACE(sharding.description());
        Model model(sharding);
        const bool here = world().rank() == world().size() - 1;
        const std::vector<float> before(model.store().buffers(0).master.as<float>(),
                                        model.store().buffers(0).master.as<float>() + 100);
        const StepResults results = model.step(here ? std::numeric_limits<float>::quiet_NaN() : 0.01F);
        EXPECT_TRUE(std::isfinite(results.loss_sum));
        EXPECT_FALSE(std::isfinite(results.norm_squared));
        // The backward pass computes the head's gradients first.
        EXPECT_EQ(model.first_non_finite(), "the gradient of ln_f.bias");
        EXPECT_TRUE(std::equal(before.begin(), before.end(), model.store().buffers(0).master.as<float>()));
    }
}

TEST(NonFiniteGradient, OfAPipelineIsNamedAsOnOneProcess) {
    if (world().size() % 2 != 0) GTEST_SKIP() << "needs an even number of ranks, for two stages";
    const int data = world().size() / 2;
    for (const int stage : {0, 3}) {
        if (stage > 0 && data == 1) continue;
        Model model({.stage = stage, .shards = data, .reduces_each_micro_batch = stage >= 2}, 2);
        const bool here = world().rank() == world().size() - 1;  // a rank with a head
        const StepResults results = model.step(here ? std::numeric_limits<float>::quiet_NaN() : 0.01F);
        EXPECT_TRUE(std::isfinite(results.loss_sum));
        EXPECT_FALSE(std::isfinite(results.norm_squared));
        EXPECT_EQ(model.first_non_finite(), "the gradient of ln_f.bias");
    }
}

// Changes one number on this rank.
void spoil(const Tensor& tensor, std::int64_t element) {
    if (tensor.dtype == DType::fp32) {
        tensor.as<float>()[element] += 1;
    } else {
        tensor.as<bfloat16>()[element] = to_bfloat16(to_float(tensor.as<bfloat16>()[element]) + 1);
    }
}

TEST(Replicas, ThatDifferAreNamedByTensorAndRank) {
    const int ranks = world().size(), last = ranks - 1;
    for (const Sharding& sharding : all_shardings()) {
        SCOPED_TRACE(sharding.description());
        Model model(sharding);
        model.step(0.01F);
        EXPECT_EQ(model.difference(), std::nullopt);
        if (ranks == 1) continue;
        const UnitLayout& block = model.store().layout(block_unit(1));
        const UnitBuffers& buffers = model.store().buffers(block_unit(1));
        const std::int64_t place = block.entries()[4].offset + 3;  // attn.c_proj.weight
        // Stage 3 without replicas holds nothing twice.
        if (sharding.keeps_parameters_whole()) {
            if (world().rank() == last) spoil(buffers.parameters, place);
            EXPECT_EQ(
                model.difference(),
                fmt::format("the parameters h.1.attn.c_proj.weight of rank {} differ from those of rank 0",
                            last));
        } else if (sharding.replicas > 1) {
            // The first element of the last shard is in the middle of the unit.
            if (world().rank() == last) spoil(buffers.state[0].values, 0);
            const auto difference = model.difference();
            ASSERT_TRUE(difference);
            EXPECT_NE(difference->find(fmt::format("of rank {} differ from those of rank ", last)),
                      std::string::npos)
                << *difference;
            EXPECT_TRUE(difference->starts_with("the first moment h.1.")) << *difference;
        } else {
            if (world().rank() == last) spoil(buffers.state[0].values, 0);
            EXPECT_EQ(model.difference(), std::nullopt);
        }
    }
}

// The first and the last stage both have the token embedding.
TEST(Replicas, OfTheTiedWeightsThatDifferAreNamed) {
    if (world().size() % 2 != 0) GTEST_SKIP() << "needs an even number of ranks, for two stages";
    const int data = world().size() / 2;  // also the first rank of the last stage
    for (const int stage : {0, 1, 3}) {
        if (stage > 0 && data == 1) continue;
        SCOPED_TRACE(stage);
        Model model({.stage = stage, .shards = data, .reduces_each_micro_batch = stage >= 2}, 2);
        model.step(0.01F);
        EXPECT_EQ(model.difference(), std::nullopt);
        const UnitBuffers& wte = model.store().buffers(wte_unit);
        if (world().rank() == data) spoil(stage == 3 ? wte.parameter_shard : wte.parameters, 3);
        EXPECT_EQ(model.difference(),
                  fmt::format("the parameters wte.weight of rank {} differ from those of rank 0", data));
    }
}

// ---- --check-replicas-every

class TrainingRun : public test::StoriesRun {
  public:
    using StoriesRun::StoriesRun;

    // The message of the comparison in a step, or nothing if no difference is found.
    std::string step_with_comparison() {
        options().check_replicas_every = 1;
        std::string message;
        try {
            step();
        } catch (const UserError& fault) {
            message = fault.what();
        }
        options().check_replicas_every = 0;
        return message;
    }
    std::optional<std::string> difference() {
        trainer().finish_update();
        return differing_replica(trainer().store(), world());
    }
    const ParameterStore& store() { return trainer().store(); }
    const Sharding& sharding() const { return mesh().sharding; }
};

// A weight that changes between steps on the last rank: one that this rank updates (in its shard), or one
// that it receives.
class WrongWeight : public testing::TestWithParam<std::vector<const char*>> {};

TEST_P(WrongWeight, IsFoundBeforeTheNextUpdateHidesIt) {
    const int ranks = world().size(), last = ranks - 1;
    const bool in_pairs =
        std::ranges::find(GetParam(), std::string_view("--zero-shard-size=2")) != GetParam().end();
    if (ranks == 1 || (in_pairs && ranks % 2 != 0)) GTEST_SKIP() << "needs another number of ranks";
    for (const bool of_own_shard : {true, false}) {
        SCOPED_TRACE(of_own_shard ? "its own" : "another's");
        const auto spoiled = [&] {
            auto run = std::make_unique<TrainingRun>(GetParam());
            EXPECT_EQ(run->step_with_comparison(), "");
            run->trainer().finish_update();
            const int shard = of_own_shard ? run->sharding().shard_of(last) : 0;
            const Tensor& parameters = run->store().buffers(wte_unit).parameters;
            if (world().rank() == last) spoil(parameters, run->store().shard(wte_unit, shard).begin + 5);
            return run;
        };
        const auto compared = spoiled();
        EXPECT_EQ(
            compared->step_with_comparison(),
            fmt::format("step 2: the parameters wte.weight of rank {} differ from those of rank 0; the cause "
                        "is faulty memory, a faulty link or a bug; start again",
                        last));
        const auto other = spoiled();
        other->step();
        // In bf16, the owner of a shard computes it from its own master weights, which hides the change. In
        // fp32, the change spreads to the ranks of the owner's replica; the other replicas then differ.
        const bool spreads = of_own_shard && other->store().dtype() == DType::fp32;
        EXPECT_EQ(other->difference().has_value(),
                  other->sharding().keeps_optimizer_whole() || (spreads && other->sharding().replicas > 1));
    }
}

INSTANTIATE_TEST_SUITE_P(
    Stages, WrongWeight,
    testing::Values(std::vector{"--zero-stage=0"}, std::vector{"--zero-stage=1"},
                    std::vector{"--zero-stage=2"}, std::vector{"--zero-stage=1", "--dtype=bf16"},
                    std::vector{"--zero-stage=2", "--zero-shard-size=2", "--reduce-every=step"},
                    std::vector{"--zero-stage=1", "--zero-shard-size=2", "--dtype=bf16"}));

// Tensor-parallel ranks have different rows of a matrix, and the same weights of a layernorm.
TEST(Replicas, OfTensorParallelRanksAreComparedWhereTheyAreAlike) {
    const int last = world().size() - 1;
    if (last % 2 == 0) GTEST_SKIP() << "needs an even number of ranks, for two tensor-parallel ones";
    TrainingRun run({"--tensor-parallel=2"});
    EXPECT_EQ(run.step_with_comparison(), "");
    run.trainer().finish_update();
    for (const UnitLayout::Entry& entry : run.store().layout(block_unit(0)).entries()) {
        if (entry.spec.name == "ln_1.weight" && world().rank() == last)
            spoil(run.store().buffers(block_unit(0)).parameters, entry.offset + 2);
    }
    EXPECT_EQ(run.difference(),
              fmt::format("the parameters h.0.ln_1.weight of rank {} differ from those of rank 0", last));
}

}  // namespace
}  // namespace llmc
