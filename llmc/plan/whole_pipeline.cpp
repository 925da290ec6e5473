#include "llmc/plan/whole_pipeline.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/parallel/mesh.h"
#include "llmc/plan/memory_limit.h"
#include "llmc/plan/micro_batches.h"

namespace llmc {

namespace {

PartSizes part_sizes(const RunPlan& plan) {
    const RunSpec& spec = plan.spec;
    PartSizes sizes{.split = spec.mesh.split(),
                    .batch = plan.micro_batch,
                    .dtype = spec.dtype,
                    .fp8 = spec.fp8,
                    .fp8_dtype = spec.fp8_dtype};
    // The rows of logits computed at a time: as many as fit in logits_bytes, a multiple of the products' tile
    // if more than a tile fits.
    constexpr std::int64_t tile = 128;
    const std::int64_t row =
        workspace_request(spec.model, sizes).vocabulary * static_cast<std::int64_t>(size_of(spec.dtype));
    const std::int64_t fit = spec.logits_bytes / row;
    sizes.logits_rows = std::clamp<std::int64_t>(fit > tile ? fit / tile * tile : fit, 1,
                                                 plan.micro_batch * spec.model.sequence_length);
    return sizes;
}

std::vector<StagePart> parts_of_stages(const RunSpec& spec, const std::shared_ptr<const Outline>& outline) {
    if (spec.mesh.pipeline * spec.virtual_stages == 1) return {whole_model(outline)};
    const PartCosts costs = part_costs(spec.model, spec.recompute);
    const auto layers = static_cast<int>(outline->layers.size());
    const int stages = spec.mesh.pipeline, chunks = stages * spec.virtual_stages;
    const std::vector<BlockRange> blocks =
        spec.pipeline_layers.empty()
            ? stages_of_layers(layers, chunks, stages, costs)
            : parse_pipeline_layers(spec.pipeline_layers, layers, chunks, stages, costs);
    const PipelineSpec pipeline{.schedule = spec.pipeline_schedule};
    return parts_of_stages(outline, blocks, stages, pipeline.splits_backward(), spec.recompute);
}

void check_chunks_of(const RunSpec& spec) {
    check_chunks({.schedule = spec.pipeline_schedule,
                  .stages = spec.mesh.pipeline,
                  .virtual_stages = spec.virtual_stages},
                 spec.model.layers() + chunks_without_layers(spec.pipeline_layers));
}

}  // namespace

void check_sizes_of(const RunSpec& spec) {
    check_mesh_sizes({.pipeline = spec.mesh.pipeline,
                      .virtual_stages = spec.virtual_stages,
                      .chunks_without_layers = chunks_without_layers(spec.pipeline_layers),
                      .tensor = spec.mesh.tensor,
                      .sequence_parallel = spec.mesh.sequence_parallel},
                     spec.model);
    check_chunks_of(spec);
}

std::int64_t micro_batch_of(const RunSpec& spec) {
    check_global_batch(spec);
    const std::int64_t micro_batch = choose_micro_batch(spec);
    check_groups(spec, micro_batch);
    return micro_batch;
}

RunPlan plan_of_whole_pipeline(const RunSpec& spec, std::int64_t micro_batch) {
    RunPlan plan;
    plan.spec = spec;
    plan.micro_batch = micro_batch;
    plan.micro_batches = plan.rank_sequences() / micro_batch;
    const PartSizes sizes = part_sizes(plan);
    plan.outline = std::make_shared<Outline>(outline_of(spec.model));
    plan.lists = std::make_shared<ModelLists>(derive_lists(*plan.outline, sizes));
    plan.pipeline = {.schedule = spec.pipeline_schedule,
                     .stages = spec.mesh.pipeline,
                     .virtual_stages = spec.virtual_stages,
                     .micro_batches = static_cast<int>(plan.micro_batches)};
    plan.parts = parts_of_stages(spec, plan.outline);
    return plan;
}

// The number of pieces of each unit's optimizer state on disk; empty if it is in memory.
std::vector<int> state_pieces(const RunPlan& plan) {
    const RunSpec& spec = plan.spec;
    std::vector<int> counts;
    const Sharding& sharding = spec.mesh.sharding;
    if (sharding.offload.state != Tier::disk || !spec.trains) return counts;
    for (const Outline::OutlinedUnit& unit : plan.outline->units) {
        const std::int64_t elements =
            UnitLayout(unit.spec, spec.mesh.tensor_place()).padded_elements(sharding.ranks());
        counts.push_back(count_of_pieces(
            sharding.keeps_optimizer_whole() ? elements : elements / sharding.shards, spec.least_piece));
    }
    return counts;
}

// The units whose matrices are updated as a whole.
std::set<int> units_with_directions(const RunPlan& plan) {
    std::set<int> units;
    const StoreDtypes dtypes = plan.spec.store_dtypes();
    for (int unit = 0; unit < plan.outline->units_count(); ++unit)
        if (dtypes.has_directions(plan.outline->unit(unit))) units.insert(unit);
    return units;
}

StepSpec step_spec(const RunPlan& plan, int stage) {
    return {.part = plan.parts[static_cast<std::size_t>(stage)],
            .stage = stage,
            .pipeline = plan.pipeline,
            .sharding = plan.spec.mesh.sharding,
            .tensor = plan.spec.mesh.split(),
            .rounds_gradients = plan.spec.gradient_dtype != DType::fp32,
            .reduces_amax = plan.spec.fp8 == Fp8Scaling::delayed,
            .recompute = plan.spec.recompute,
            .state_pieces = state_pieces(plan),
            .units_with_directions = units_with_directions(plan)};
}

std::vector<StagePart> parts_of_pipeline(const RunSpec& spec) {
    check_chunks_of(spec);
    if (spec.mesh.pipeline == 1 || most_micro_batches(spec) == 0) return {};
    return parts_of_stages(spec, std::make_shared<Outline>(outline_of(spec.model)));
}

}  // namespace llmc
