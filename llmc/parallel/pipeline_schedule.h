// Pipeline schedules as data: for each stage, the forward and backward passes that it runs, in order. A schedule is a
// pure function of the numbers of stages, chunks and micro-batches; no measured time enters. What it costs and what it
// looks like: pipeline_simulation.h, pipeline_timeline.h. Sending, receiving and the passes themselves are no part of
// this: build_step.h makes actions of them.
//
// The model is cut into `chunks` of neighbouring layers (pipeline_partition.h); chunk c runs on stage c % stages. Every
// schedule runs each chunk's passes of a kind in increasing order of micro-batches, so that gradients are added up in
// the same order and all schedules agree bit for bit.
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
    naive,  // a micro-batch through all stages and back, then the next one
    gpipe,  // all forward passes, then all backward passes (Huang et al., 2019)
    one_f_one_b,  // forward and backward in turn, so that at most `stages` micro-batches are under way: PipeDream-flush
                  // (Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021)
    interleaved,  // the same with several chunks a stage (Narayanan et al., "Efficient large-scale language model
                  // training on GPU clusters using Megatron-LM", 2021)
    zb_h1,  // weight gradients are made later than input gradients, while a stage would wait (Qi et al., "Zero
            // bubble pipeline parallelism", 2023)
};
inline constexpr std::array all_pipeline_schedules = {PipelineSchedule::naive, PipelineSchedule::gpipe,
                                                      PipelineSchedule::one_f_one_b,
                                                      PipelineSchedule::interleaved, PipelineSchedule::zb_h1};
// "naive", "gpipe", "1f1b", "interleaved", "zb-h1"
std::string_view name_of(PipelineSchedule schedule);

enum class PassKind {
    forward,
    backward,        // both parts of it
    backward_input,  // the gradient of the chunk's input
    backward_weight  // those of its weights
};
std::string_view name_of(PassKind kind);

struct Pass {
    PassKind kind = PassKind::forward;
    int chunk = 0;  // of the whole model
    int micro_batch = 0;
    auto operator<=>(const Pass&) const = default;
};
// "forward of micro-batch 3, chunk 1"
std::string to_string(const Pass& pass);

struct PipelineSpec {
    PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
    int stages = 1;
    int virtual_stages = 1;  // chunks of a stage
    int micro_batches = 1;

    int chunks() const { return stages * virtual_stages; }
    int stage_of(int chunk) const { return chunk % stages; }
    // Whether backward passes come in two parts.
    bool splits_backward() const { return schedule == PipelineSchedule::zb_h1; }
    // Passes of all kinds, and the number of one of them among these.
    std::size_t size() const {
        return 4 * static_cast<std::size_t>(chunks()) * static_cast<std::size_t>(micro_batches);
    }
    std::size_t index_of(const Pass& pass) const {
        const auto number = [](auto n) { return static_cast<std::size_t>(n); };
        return (number(pass.kind) * number(chunks()) + number(pass.chunk)) * number(micro_batches) +
               number(pass.micro_batch);
    }
};

// Refuses with a UserError, in terms of the program's options, chunks that a schedule does not have, and more of them than
// `layers`, whatever the micro-batches. Of stages there are no more (mesh_sizes.h).
void check_chunks(const PipelineSpec& spec, std::int64_t layers);

// The passes of each stage, in order, of a spec that check_chunks lets pass, with micro-batches in the groups that interleaved
// stages take (plan/micro_batches.h refuses others).
std::vector<std::vector<Pass>> pipeline_passes(const PipelineSpec& spec);

// The pass of another chunk whose result a pass takes: a forward pass that of the chunk before, a backward pass that of
// the chunk behind. Weight gradients, and the ends of the model, need none.
std::optional<Pass> source_of(const PipelineSpec& spec, const Pass& pass);

// Goes through all stages side by side, each in its order, a pass after its source, and calls `visit` with each stage and
// pass. Returns how many passes of each stage have run: all, unless some wait for ever. Passes are those of the spec.
std::vector<std::size_t> run_through(const PipelineSpec& spec, const std::vector<std::vector<Pass>>& passes,
                                     const std::function<void(int, const Pass&)>& visit);

// How many passes' activations a stage holds at most, each from its forward pass until its backward pass (its weight
// part) is done; a pass is one chunk of one micro-batch. With p stages, v chunks a stage, m micro-batches, on stage s:
//   naive        1
//   gpipe        m
//   1f1b         min(m, p - s)
//   interleaved  min(m v, (v + 1) p - 2 s - 1)
//   zb-h1        min(m, p)
int passes_in_flight(const PipelineSpec& spec, int stage);

// Stops with a ProgrammingError that names the first pass that
// - is not a pass of its stage, comes twice, or is missing;
// - runs before an earlier micro-batch's of the same chunk and kind;
// - goes back before it went forward, or makes weight gradients before the gradient of its input;
// - holds more activations than passes_in_flight allows;
// - waits for ever, where each stage runs its passes in order and each pass waits for its source.
void check_passes(const PipelineSpec& spec, const std::vector<std::vector<Pass>>& passes);

}  // namespace llmc
