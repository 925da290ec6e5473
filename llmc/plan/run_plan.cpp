// The plan of a rank: the lists of its stage, and their memory.
#include "llmc/plan/run_plan.h"
#include "llmc/parallel/step/orthogonal.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/parallel/step/build_step.h"
#include "llmc/plan/memory_limit.h"
#include "llmc/plan/micro_batches.h"
#include "llmc/plan/whole_pipeline.h"

namespace llmc {

namespace {

// Tokens and targets are int32, and the vocabulary is rounded up.
void check_vocabulary(std::int64_t vocabulary) {
    constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max() / 128 * 128;
    if (vocabulary > most) user_error("--vocab-size {} is out of range; give 1 to {}", vocabulary, most);
}

// Memory without a dtype, in fp32 words.
BufferId add_bytes(MemoryLayout& memory, ArenaKind arena, std::size_t bytes) {
    return memory.add(arena, std::string(name_of(arena)), DType::fp32,
                      {static_cast<std::int64_t>((bytes + 3) / 4)});
}

std::size_t bytes_of_whole_gradients(const RunPlan& plan) {
    Sharding sharding = plan.spec.mesh.sharding;
    if (!sharding.holds_back_gradients() || !plan.spec.trains) return 0;
    sharding.reduces_each_micro_batch = true;
    MemoryLayout otherwise;
    lay_out_store(otherwise, plan.spec.store_dtypes(), plan.part(), sharding,
                  static_cast<int>(plan.micro_batches), plan.spec.mesh.tensor_place());
    const std::size_t whole = plan.memory.bytes(ArenaKind::gradients);
    return whole - std::min(whole, otherwise.bytes(ArenaKind::gradients));
}

// Evaluates one micro-batch per stage at a time, so that all stages are busy.
StepSpec evaluation_spec(const RunPlan& plan, int stage) {
    StepSpec spec = step_spec(plan, stage);
    spec.pipeline.micro_batches = spec.pipeline.stages;
    spec.slots = buffers_in_flight(plan.training).first_parts;
    return spec;
}

StepSpec single_micro_batch_spec(const RunPlan& plan, int stage) {
    StepSpec spec = evaluation_spec(plan, stage);
    spec.pipeline.micro_batches = 1;
    return spec;
}

void build_lists(RunPlan& plan) {
    const int stage = plan.spec.mesh.stage();
    plan.training = build_training_step(step_spec(plan, stage));
    plan.update = build_update_step(step_spec(plan, stage));
    plan.evaluation = build_evaluation_step(evaluation_spec(plan, stage));
    plan.generation = build_generation_step(single_micro_batch_spec(plan, stage));
    plan.diagnosis = build_evaluation_step(single_micro_batch_spec(plan, stage));
    plan.parameter_gathers = build_parameter_gathers(step_spec(plan, stage));
}

// The lists of all stages, which must agree.
class ListsOfStages {
  public:
    void add(const RunPlan& plan) {
        for (std::size_t i = 0; i < lists_.size(); ++i) {
            const Step& list = plan.*kinds[i];
            check_step(list);
            lists_[i].push_back(list);
        }
    }
    void check() const {
        for (const std::vector<Step>& stages : lists_) check_stages(stages);
    }

  private:
    static constexpr std::array kinds = {&RunPlan::training,   &RunPlan::update,
                                         &RunPlan::evaluation, &RunPlan::generation,
                                         &RunPlan::diagnosis,  &RunPlan::parameter_gathers};
    std::array<std::vector<Step>, kinds.size()> lists_;
};

// ---- the plan

// The largest numbers of buffers that any of the stage's lists uses at once.
BuffersInFlight in_flight(const RunPlan& plan) {
    BuffersInFlight most;
    for (const Step* list : {&plan.training, &plan.evaluation, &plan.generation, &plan.diagnosis}) {
        const BuffersInFlight of = buffers_in_flight(*list);
        most.slots = std::max(most.slots, of.slots);
        most.chunk_inputs = std::max(most.chunk_inputs, of.chunk_inputs);
        most.residual_gradients = std::max(most.residual_gradients, of.residual_gradients);
        most.output_gradients = std::max(most.output_gradients, of.output_gradients);
        most.tokens = std::max(most.tokens, of.tokens);
        most.residuals.resize(std::max(most.residuals.size(), of.residuals.size()));
        for (std::size_t slot = 0; slot < of.residuals.size(); ++slot)
            most.residuals[slot] = std::max(most.residuals[slot], of.residuals[slot]);
        if (list == &plan.training) most.first_parts = of.first_parts;
    }
    return most;
}

// The bytes that ranks exchange for each unit.
std::vector<UnitBytes> unit_bytes(const RunSpec& spec, std::span<const UnitLayout> units) {
    std::vector<UnitBytes> bytes;
    for (const UnitLayout& unit : units) {
        const auto elements = static_cast<std::uint64_t>(unit.padded_elements(spec.mesh.data_ranks()));
        const auto replicated = static_cast<std::uint64_t>(unit.elements() - unit.replicated_begin());
        bytes.push_back(
            {.parameters =
                 stored_parameters(unit.spec(), static_cast<std::int64_t>(elements), spec.dtype).bytes(),
             .gradients = elements * size_of(spec.gradient_dtype),
             .replicated_gradients = replicated * size_of(spec.gradient_dtype),
             .gradient_size = size_of(spec.gradient_dtype),
             .directions = elements * size_of(spec.store_dtypes().of_directions())});
    }
    return bytes;
}

BytesMoved bytes_moved(const Step& step, const StoreLayout& store, const MemoryLayout& memory) {
    BytesMoved bytes;
    for (const Action& action : step.actions) {
        const std::uint64_t moved = bytes_moved(action, store, memory);
        if (action.stream == StreamKind::to_device) bytes.to_device += moved;
        if (action.stream == StreamKind::from_device) bytes.from_device += moved;
        if (action.stream == StreamKind::disk_in) bytes.read += moved;
        if (action.stream == StreamKind::disk_out) bytes.written += moved;
    }
    return bytes;
}

// Of the stage, each size once.
std::vector<MatrixSizes> matrices_updated_as_a_whole(const RunPlan& plan) {
    std::vector<MatrixSizes> matrices;
    if (!plan.store.directions) return matrices;
    for (const auto& [number, _] : plan.part().units) {
        const Outline::OutlinedUnit& unit = plan.outline->unit(number);
        for (const ParamSpec& spec : unit.spec.params) {
            if (!plan.store.dtypes.has_directions(unit, spec)) continue;
            const MatrixSizes sizes = matrix_sizes(spec);
            if (std::ranges::find(matrices, sizes) == matrices.end()) matrices.push_back(sizes);
        }
    }
    return matrices;
}

void lay_out_memory(RunPlan& plan, const DeviceSizes& sizes, std::size_t staging_bytes) {
    const RunSpec& spec = plan.spec;
    plan.store = lay_out_store(plan.memory, spec.store_dtypes(), plan.part(), spec.mesh.sharding,
                               static_cast<int>(plan.micro_batches), spec.mesh.tensor_place(), spec.trains);
    plan.sent = bytes_sent(plan.training, unit_bytes(spec, plan.store.units), *plan.lists);
    plan.moved = bytes_moved(plan.training, plan.store, plan.memory);
    plan.bytes_of_whole_gradients = bytes_of_whole_gradients(plan);
    std::int64_t norm_blocks = 0;
    for (const UnitLayout& unit : plan.store.units)
        norm_blocks +=
            unit.spec().is_frozen() ? 0 : unit.padded_elements(spec.mesh.data_ranks()) / norm_block_elements;
    plan.activations = lay_out_activations(plan.memory, {.lists = plan.lists.get(),
                                                         .part = plan.part(),
                                                         .in_flight = in_flight(plan),
                                                         .norm_blocks = norm_blocks,
                                                         .recompute = spec.recompute});
    if (spec.copies_checkpoints) plan.copy = lay_out_copy(plan.memory, plan.store, spec.mesh, plan.parts);
    plan.communication = add_bytes(plan.memory, ArenaKind::communication, staging_bytes);
    std::size_t workspace =
        sizes.workspace_bytes(workspace_request(spec.model, plan.lists->kinds.front().sizes));
    for (const MatrixSizes& matrix : matrices_updated_as_a_whole(plan))
        for (const WorkspaceRequest& request :
             workspace_of_orthogonalise(matrix, plan.store.dtypes.of_directions()))
            workspace = std::max(workspace, sizes.workspace_bytes(request));
    plan.workspace = add_bytes(plan.memory, ArenaKind::workspace, workspace);
}

StageNeeds needs_of(const RunPlan& plan) {
    return {.memory = plan.memory.sizes(),
            .host = plan.memory.host_sizes(),
            .disk = plan.store.file_bytes,
            .sent = plan.sent,
            .moved = plan.moved};
}

// The plan of this rank's stage, with the needs of all stages.
RunPlan plan_with(const RunSpec& spec, const DeviceSizes& sizes, std::size_t staging_bytes,
                  std::int64_t micro_batch) {
    check_micro_batches(spec, micro_batch);
    RunPlan own;
    ListsOfStages lists;
    std::vector<StageNeeds> needs;
    const RunPlan all = plan_of_whole_pipeline(spec, micro_batch);
    sizes.require_sizes(workspace_request(spec.model, all.lists->kinds.front().sizes));
    for (int stage = 0; stage < spec.mesh.pipeline; ++stage) {
        RunPlan plan = all;
        plan.spec.mesh.rank = spec.mesh.rank_of(stage, spec.mesh.data_rank(), spec.mesh.tensor_rank());
        build_lists(plan);
        lay_out_memory(plan, sizes, staging_bytes);
        lists.add(plan);
        needs.push_back(needs_of(plan));
        if (stage == spec.mesh.stage()) own = std::move(plan);
    }
    lists.check();
    for (const StageNeeds& stage : needs)
        own.largest_memory = std::max(own.largest_memory, stage.memory.total_bytes());
    own.stages = std::move(needs);
    return own;
}

}  // namespace

int RunNeeds::fullest_stage() const {
    const auto bytes = [](const StageNeeds& stage) { return stage.memory.total_bytes(); };
    return static_cast<int>(std::ranges::max_element(stages, {}, bytes) - stages.begin());
}

std::size_t RunNeeds::largest_host_memory() const {
    std::size_t most = 0;
    for (const StageNeeds& stage : stages) most = std::max(most, stage.host.total_bytes());
    return most;
}

std::uint64_t RunNeeds::largest_disk() const {
    return std::ranges::max_element(stages, {}, &StageNeeds::disk)->disk;
}

std::uint64_t bytes_moved(const Action& action, const StoreLayout& store, const MemoryLayout& memory) {
    const auto unit = static_cast<std::size_t>(action.unit);
    const auto shards =
        static_cast<std::uint64_t>(store.sharding.keeps_optimizer_whole() ? 1 : store.sharding.shards);
    if (action.kind == ActionKind::upload_directions || action.kind == ActionKind::download_directions)
        return static_cast<std::uint64_t>(store.units[unit].padded_elements(store.sharding.ranks())) *
               size_of(store.dtypes.of_directions()) / shards;
    if (action.stream == StreamKind::to_device || action.stream == StreamKind::from_device) {
        const UnitBufferIds& ids = store.buffers[unit];
        const BufferId id = moves_parameters(action.kind) ? *ids.host_parameters : *ids.host_gradients;
        const MemoryLayout::Buffer& buffer = memory.buffers()[static_cast<std::size_t>(id.index)];
        return static_cast<std::uint64_t>(buffer.shape.elements()) * size_of(buffer.dtype);
    }
    if (!is_on_disk(action)) return 0;
    if (action.piece >= 0) {
        const StatePiece& piece = store.pieces[unit][static_cast<std::size_t>(action.piece)];
        return store.dtypes.piece_bytes(piece.elements()).all;
    }
    const auto parameter_shards =
        static_cast<std::uint64_t>(store.sharding.keeps_parameters_whole() ? 1 : store.sharding.shards);
    return whole_blocks(stored_parameters(store.units[unit].spec(),
                                          store.units[unit].padded_elements(store.sharding.ranks()),
                                          store.dtypes.compute)
                            .bytes() /
                        parameter_shards);
}

namespace {

// The plan of a stage for a step of `micro_batches`.
RunPlan plan_of_stage(const RunPlan& all, int stage, std::int64_t micro_batches, const DeviceSizes& sizes,
                      std::size_t staging_bytes) {
    RunPlan plan = all;
    plan.spec.mesh.rank = all.spec.mesh.rank_of(stage, 0, 0);
    plan.micro_batches = micro_batches;
    plan.pipeline.micro_batches = static_cast<int>(micro_batches);
    build_lists(plan);
    lay_out_memory(plan, sizes, staging_bytes);
    return plan;
}

// The value after `times` more of the steps from `first` to `second`. Sizes may be absurd, so it is saturated.
template <class T>
T extrapolated(T first, T second, std::int64_t times) {
    const auto base = static_cast<long double>(first), step = static_cast<long double>(second) - base;
    return static_cast<T>(std::clamp(base + static_cast<long double>(times) * step, 0.0L, 0x1p60L));
}

StageNeeds extrapolated(const StageNeeds& first, const StageNeeds& second, std::int64_t times) {
    StageNeeds needs;
    for (const auto memory : {&StageNeeds::memory, &StageNeeds::host}) {
        for (const ArenaKind arena : all_arenas)
            (needs.*memory).bytes(arena) =
                extrapolated((first.*memory).bytes(arena), (second.*memory).bytes(arena), times);
    }
    for (const auto kind :
         {&BytesSent::inside, &BytesSent::across, &BytesSent::tied, &BytesSent::stages, &BytesSent::tensor})
        needs.sent.*kind = extrapolated(first.sent.*kind, second.sent.*kind, times);
    for (const auto kind :
         {&BytesMoved::read, &BytesMoved::written, &BytesMoved::to_device, &BytesMoved::from_device})
        needs.moved.*kind = extrapolated(first.moved.*kind, second.moved.*kind, times);
    needs.disk = first.disk;
    return needs;
}

}  // namespace

ShortStep::ShortStep(const RunSpec& spec)
    : group(spec.pipeline_schedule == PipelineSchedule::interleaved ? spec.mesh.pipeline : 1),
      few(2 * spec.mesh.pipeline + 2 * group) {}

// In every schedule, a group of micro-batches adds as much as the group before it once all stages are busy: bytes
// that are sent, and with GPipe activations.
ShortPlans short_plans(const RunSpec& spec, const DeviceSizes& sizes, std::size_t staging_bytes,
                       std::int64_t micro_batch) {
    const ShortStep step(spec);
    const std::int64_t whole = spec.rank_sequences() / micro_batch;
    check_layers(spec, std::min(whole, step.few + step.group));
    const RunPlan all = plan_of_whole_pipeline(spec, micro_batch);
    sizes.require_sizes(workspace_request(spec.model, all.lists->kinds.front().sizes));
    const std::int64_t more = (whole - step.few) / step.group;
    const auto of = [&](std::int64_t micro_batches) {
        std::vector<RunPlan> stages;
        for (int stage = 0; stage < spec.mesh.pipeline; ++stage)
            stages.push_back(plan_of_stage(all, stage, micro_batches, sizes, staging_bytes));
        return stages;
    };
    if (more <= 1) return {of(whole), {}, 0};
    return {of(step.few), of(step.few + step.group), more};
}

RunNeeds needs_of(const ShortPlans& plans) {
    RunNeeds needs{plans.first.front().spec, plans.first.front().micro_batch, {}};
    for (std::size_t stage = 0; stage < plans.first.size(); ++stage)
        needs.stages.push_back(plans.more == 0 ? needs_of(plans.first[stage])
                                               : extrapolated(needs_of(plans.first[stage]),
                                                              needs_of(plans.second[stage]), plans.more));
    return needs;
}

RunNeeds needs_of(const RunSpec& spec, const DeviceSizes& sizes, std::size_t staging_bytes,
                  std::int64_t micro_batch) {
    RunNeeds needs = needs_of(short_plans(spec, sizes, staging_bytes, micro_batch));
    needs.spec = spec;
    return needs;
}

RunPlan short_plan(const RunNeeds& needs, int stage, std::int64_t micro_batches, const DeviceSizes& sizes,
                   std::size_t staging_bytes) {
    const RunPlan all = plan_of_whole_pipeline(needs.spec, needs.micro_batch);
    return plan_of_stage(all, stage, micro_batches, sizes, staging_bytes);
}

std::size_t FindNeeds::least(const RunSpec& spec, std::int64_t micro_batch) const {
    const std::int64_t few = std::min(ShortStep(spec).few, spec.rank_sequences() / micro_batch);
    RunSpec without = spec;
    without.copies_checkpoints = false;
    return short_plan({without, micro_batch, {}}, 0, few, sizes_, staging_bytes_)
        .memory.sizes()
        .total_bytes();
}

RunNeeds needs_of(const RunSpec& spec, const DeviceSizes& sizes, std::size_t staging_bytes) {
    check_sizes_of(spec);
    require_possible(spec);
    check_vocabulary(spec.model.vocabulary);
    const std::int64_t micro_batch = micro_batch_of(spec);
    const FindNeeds find(sizes, staging_bytes);
    RunSpec without = spec;
    without.copies_checkpoints = false;
    // If the user gave no micro-batch size, the memory decides.
    RunNeeds needs = spec.micro_batch_sequences == 0 ? needs_that_fit(without, find, micro_batch)
                                                     : find(without, micro_batch);
    if (!spec.copies_checkpoints) return needs;
    RunNeeds with = find(spec, needs.micro_batch);
    if (fits(spec.machine, with.largest_memory()) && fits_host(spec.machine, with.largest_host_memory()))
        return with;
    for (const StageNeeds& stage : with.stages)
        needs.lacking_copy = std::max(needs.lacking_copy, stage.memory.bytes(ArenaKind::checkpoint) +
                                                              stage.host.bytes(ArenaKind::checkpoint));
    return needs;
}

RunPlan plan_run(const RunSpec& spec, const DeviceSizes& sizes, std::size_t staging_bytes) {
    const RunNeeds needs = needs_of(spec, sizes, staging_bytes);
    std::string lack;
    const FindNeeds find(sizes, staging_bytes);
    if (!fits(spec.machine, needs.largest_memory())) {
        const Remedy remedy = remedy_of(needs, find);
        if (!spec.may_exceed_machine) refuse_memory(needs, remedy);
        lack = lack_of_memory(needs, remedy);
    } else if (!fits_host(spec.machine, needs.largest_host_memory())) {
        lack = lack_of_host_memory(needs, find);
        if (!spec.may_exceed_machine) throw UserError(lack);
    }
    RunPlan plan = plan_with(needs.spec, sizes, staging_bytes, needs.micro_batch);
    plan.lack = std::move(lack);
    plan.lacking_copy = needs.lacking_copy;
    return plan;
}

}  // namespace llmc
