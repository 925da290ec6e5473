// Equal gradients give equal weights on every mesh, bit for bit: of Lion, whose signs a rounding may change, and of
// Muon, whose matrices lie in shards and on tensor-parallel ranks but are updated as a whole.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "llmc/device/device.h"
#include "llmc/parallel/step/executor.h"
#include "llmc/parallel/zero/unit_transfer.h"
#include "llmc/plan/run_plan.h"
#include "mpi_test.h"
#include "test/gpt2_config.h"
#include "trainer_run.h"

namespace llmc {
namespace {

using test::world;

constexpr std::int64_t sequence_length = 8;

// The weights after two updates, on the root of `ranks`.
std::vector<float> updated(Communicator& ranks, Mesh mesh, const Model& model, OptimizerKind optimizer,
                           DType dtype) {
    mesh.rank = ranks.rank();
    const std::unique_ptr<Device> device = make_cpu_device(1);
    const RunPlan plan = plan_run({.model = model,
                                   .dtype = dtype,
                                   .optimizer = optimizer,
                                   .mesh = mesh,
                                   .global_batch_tokens = mesh.sharding.ranks() * sequence_length,
                                   .micro_batch_sequences = 1},
                                  device->sizes(), 0);
    const Arenas arenas(*device, plan.memory);
    const HyperparameterValues numbers = {0.95, 0, 0};
    ParameterStore store(*device, arenas, plan.store, 0.1, mesh.shard(), "", numbers);
    const MeshGroups groups(ranks, mesh, plan.parts);
    const ActivationBuffers<Tensor> activations = bind(plan.activations, arenas);
    Executor executor(*plan.lists, *device, groups, store, activations, 1, true);
    device->ops().set_workspace(arenas[plan.workspace]);
    device->ops().run(Fill{activations.results, 0.0F});
    store.initialize(1);
    executor.run(plan.parameter_gathers, {});
    std::vector<float> values;
    for (std::int64_t step = 1; step <= 2; ++step) {
        for (int unit = 0; unit < store.units(); ++unit) {
            if (!store.has(unit)) continue;
            const ElementRange own = store.updated(unit);
            values.resize(static_cast<std::size_t>(own.size()));
            // Initial weights of another seed.
            initialize_unit(values, own.begin, store.layout(unit), static_cast<std::uint64_t>(step) + 1);
            upload_rounded(*device, store.buffers(unit).updated_gradients, values);
        }
        const bool is_muon = optimizer == OptimizerKind::muon;
        executor.run(
            plan.update,
            {.update = Update{.step = {step, 1e-2, is_muon ? numbers : HyperparameterValues{0.9, 0.99}},
                              .others = {step, 1e-2, {0.9, 0.95, 1e-8}}}});
    }
    UnitTransfer transfer(store, ranks, mesh, plan.parts);
    std::vector<float> weights;
    for (int unit = 0; unit < store.units(); ++unit) {
        const std::span<const float> whole = transfer.collect(unit, Kept::master);
        const auto elements = transfer.units()[static_cast<std::size_t>(unit)].elements();
        if (transfer.is_root()) weights.insert(weights.end(), whole.begin(), whole.begin() + elements);
    }
    return weights;
}

std::vector<Mesh> meshes() {
    const int ranks = world().size();
    std::vector<Mesh> all;
    for (const int tensor : {1, 2, 4}) {
        if (ranks % tensor != 0) continue;
        const int data = ranks / tensor;
        for (int stage = 0; stage <= (data > 1 ? 3 : 0); ++stage)
            all.push_back(
                {.tensor = tensor,
                 .sharding = {.stage = stage, .shards = data, .reduces_each_micro_batch = stage >= 2}});
    }
    return all;
}

TEST(EqualGradients, GiveEqualWeights) {
    const std::unique_ptr<Communicator> alone = world().split(world().rank(), 0);
    const Model gpt = gpt2({.layers = 2,
                            .heads = 4,
                            .channels = 24,
                            .sequence_length = sequence_length,
                            .vocabulary = 37}),
                llama = model_with("llama-tiny", {{"layers", std::int64_t{2}},
                                                  {"heads", std::int64_t{4}},
                                                  {"kv-heads", std::int64_t{2}},
                                                  {"channels", std::int64_t{24}},
                                                  {"mlp-size", std::int64_t{40}},
                                                  {"seq-len", sequence_length}});
    for (const Model* model : {&gpt, &llama}) {
        for (const OptimizerKind optimizer : {OptimizerKind::lion, OptimizerKind::muon}) {
            for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
                const std::vector<float> one = updated(*alone, {}, *model, optimizer, dtype);
                for (const Mesh& mesh : meshes()) {
                    SCOPED_TRACE(fmt::format("{} {} {} T={} {}", model->description,
                                             optimizer_of(optimizer).name, name_of(dtype), mesh.tensor,
                                             mesh.sharding.description()));
                    const std::vector<float> here = updated(world(), mesh, *model, optimizer, dtype);
                    EXPECT_TRUE(world().rank() != 0 || here == one);
                }
            }
        }
    }
}

}  // namespace
}  // namespace llmc
