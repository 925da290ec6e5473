// Defines pipeline schedules as data: for each stage, its forward and backward passes in order. A schedule is
// a pure function of the numbers of stages, chunks and micro-batches; no measured time enters. The simulation
// (pipeline_simulation.h) computes its duration, and timeline/pipeline_timeline.h draws it. build_step.h
// makes a list of actions from it: the work of each pass, and the transfers.
//
// The model is cut into `chunks` of neighbouring layers (pipeline_partition.h); chunk c runs on stage c %
// stages. Every schedule runs each chunk's passes of a kind in increasing order of micro-batches. Gradients
// are thus added in the same order, and all schedules agree bit for bit.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace llmc {

enum class PipelineSchedule {
    // One micro-batch goes through all stages and back, then the next one.
    naive,
    // All forward passes, then all backward passes (Huang et al., 2019).
    gpipe,
    // Forward and backward passes alternate, so that at most `stages` micro-batches are in flight:
    // PipeDream-flush (Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021).
    one_f_one_b,
    // The same with several chunks per stage (Narayanan et al., "Efficient large-scale language model
    // training on GPU clusters using Megatron-LM", 2021).
    interleaved,
    // All forward passes of a stage's first chunk, then those of its second, and so on; then all backward passes from
    // the last chunk to the first (Lamy-Poirier, "Breadth-first pipeline parallelism", 2022). On one stage whose chunks
    // are single layers, parameters and gradients are needed for one layer after another, and not once for each
    // micro-batch ("vertical" in GreedySnake, 2025).
    breadth_first,
    // Weight gradients are computed later than input gradients, at times when a stage would otherwise be idle
    // (Qi et al., "Zero bubble pipeline parallelism", 2023).
    zb_h1,
};
inline constexpr std::array all_pipeline_schedules = {
    PipelineSchedule::naive,       PipelineSchedule::gpipe,         PipelineSchedule::one_f_one_b,
    PipelineSchedule::interleaved, PipelineSchedule::breadth_first, PipelineSchedule::zb_h1};
// "naive", "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1"
std::string_view name_of(PipelineSchedule schedule);

enum class PassKind {
    forward,
    backward,        // the gradients of the chunk's input and of its weights
    backward_input,  // the gradient of the chunk's input
    backward_weight  // the gradients of its weights
};
std::string_view name_of(PassKind kind);

struct Pass {
    PassKind kind = PassKind::forward;
    int chunk = 0;  // its number in the whole model; Action::chunk is its number in the stage
    int micro_batch = 0;
    auto operator<=>(const Pass&) const = default;
};
// "forward of micro-batch 3, chunk 1"
std::string to_string(const Pass& pass);

struct PipelineSpec {
    PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
    int stages = 1;
    int virtual_stages = 1;  // chunks per stage
    int micro_batches = 1;

    int chunks() const { return stages * virtual_stages; }
    int stage_of(int chunk) const { return chunk % stages; }
    // Whether backward passes are split into backward_input and backward_weight.
    bool splits_backward() const { return schedule == PipelineSchedule::zb_h1; }
    // So many micro-batches go through one chunk of a stage before they go through its next.
    int group() const {
        return schedule == PipelineSchedule::breadth_first ? micro_batches : virtual_stages > 1 ? stages : 1;
    }
    // size(): the range of index_of(), which gives each (kind, chunk, micro-batch) a number. No schedule uses
    // all kinds.
    std::size_t size() const {
        return 4 * static_cast<std::size_t>(chunks()) * static_cast<std::size_t>(micro_batches);
    }
    std::size_t index_of(const Pass& pass) const {
        const auto number = [](auto n) { return static_cast<std::size_t>(n); };
        return (number(pass.kind) * number(chunks()) + number(pass.chunk)) * number(micro_batches) +
               number(pass.micro_batch);
    }
};

// Checks the chunks, whatever the micro-batches. Throws a UserError, in terms of the program's options, if
// the schedule does not have such chunks or if there are more of them than `layers`. mesh.h has already
// refused too many stages.
void check_chunks(const PipelineSpec& spec, std::int64_t layers);

// The passes of a stage, in order, and those of each stage. The spec must satisfy check_chunks, and its
// micro-batches must form the groups that interleaved stages need (plan/micro_batches.h refuses others).
std::vector<Pass> passes_of_stage(const PipelineSpec& spec, int stage);
std::vector<std::vector<Pass>> pipeline_passes(const PipelineSpec& spec);

// The pass of another chunk whose result a pass needs. A forward pass needs that of the chunk before, a
// backward pass that of the chunk after. Passes for weight gradients, and those at the ends of the model,
// need none.
std::optional<Pass> source_of(const PipelineSpec& spec, const Pass& pass);

// Visits the passes of all stages in an order in which they can run: each stage in its own order, and each
// pass after its source. Returns how many passes of each stage have run: all, unless the stages deadlock.
// `passes` are those of the spec.
std::vector<std::size_t> run_through(const PipelineSpec& spec, const std::vector<std::vector<Pass>>& passes,
                                     const std::function<void(int, const Pass&)>& visit);

// The most passes whose activations a stage holds at once. A pass, one chunk of one micro-batch, holds them
// from its forward pass to the end of its backward pass (backward_weight, if split). With p stages, v chunks
// per stage and m micro-batches, stage s holds:
//   naive          1
//   gpipe          m
//   1f1b           min(m, p - s)
//   interleaved    min(m v, (v + 1) p - 2 s - 1)
//   breadth-first  m v
//   zb-h1          min(m, p)
int passes_in_flight(const PipelineSpec& spec, int stage);

// Throws a ProgrammingError that names the first pass with a fault. A pass must belong to its stage and come
// exactly once, after the same pass of earlier micro-batches. A backward pass must come after its forward
// pass, and weight gradients after the gradient of the input. A stage must not hold more activations than
// passes_in_flight allows. No pass may wait for ever if each stage runs its passes in order and each pass
// waits for its source.
void check_passes(const PipelineSpec& spec, const std::vector<std::vector<Pass>>& passes);

}  // namespace llmc
