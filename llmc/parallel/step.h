// A step is data: the list of what one rank does in one optimizer step, each action with the buffers it reads
// and writes and the stream it runs on. build_step.h makes the list, executor.h runs it; the checks, the byte
// count, the sizes of the activation buffers and `--print-step` read it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/device/queues.h"

namespace llmc {

enum class ActionKind {
    load,            // the tokens of a micro-batch to the device
    zero,            // what the backward pass adds a unit's gradients to = 0
    forward,         // a part of the model; the head's forward alone makes losses only
    backward,        // the same part's; the head's includes its forward, since its logits are not kept
    round,           // a unit's gradients = its gradient sums, rounded
    accumulate,      // a unit's gradients += its gradient sums, rounded
    reduce_scatter,  // a unit's gradients: each rank receives the sum of its shard
    all_gather,      // a unit's gradients: every rank receives the summed shards
    reduce_loss,     // the loss summed over ranks
    square,          // the sums of squares of this rank's shards of all gradients
    gather_squares,  // those of all ranks
    norm,            // the squared norm of all gradients, from the sums
    update,          // AdamW on a unit
};
std::string_view name_of(ActionKind kind);

// A part of the model that runs as one action. The embedding uses the units wte and wpe, the head ln_f and
// wte.
enum class PartKind { embedding, block, head };
struct Part {
    PartKind kind = PartKind::embedding;
    int block = 0;
    bool operator==(const Part&) const = default;
};
std::string to_string(const Part& part);

// What an action reads or writes. Parameters, gradients and optimizer state are a unit's; tokens, residuals
// and saved activations are a micro-batch's and lie in its slot, which a later micro-batch uses again.
enum class BufferRole {
    parameters,  // index: unit
    gradients,   // index: unit
    gradient_sums,  // index: gradient_sums_of(unit); where gradients are kept in bf16, those of a micro-batch in fp32
    optimizer,          // index: unit; master weights and moments
    tokens,             // inputs and targets
    residual,           // index: l, the input of block l (of the head for l = L)
    saved,              // index: block; what its backward needs beside the residual
    residual_gradient,  // the gradient that flows back along the residual stream
    loss,               // of the micro-batches so far, then of all ranks
    squares,            // the gradients' sums of squares, block by block
    norm,
};
// The unit in whose buffer of gradient sums those of a unit are: blocks, one after the other, use one.
int gradient_sums_of(int unit, int layers);

struct BufferUse {
    BufferRole role;
    int index = 0;
    bool operator==(const BufferUse&) const = default;
};

struct Action {
    ActionKind kind;
    StreamKind stream = StreamKind::compute;
    Part part{};           // forward, backward
    int unit = -1;         // zero, round, accumulate, reduce_scatter, all_gather, update
    int micro_batch = -1;  // load, forward, backward
    int slot = 0;          // where the micro-batch's activations lie
    std::vector<BufferUse> reads;
    std::vector<BufferUse> writes;
    // The last earlier action of the other stream that must be done first, by its place in the list; -1 for
    // none. A stream runs its own actions in their order.
    int after = -1;
};

struct Step {
    int layers = 0;
    int data_ranks = 1;
    int micro_batches = 0;
    std::vector<Action> actions;
};

// Sets every action's `after`: two actions that use the same buffer, one of them writing it, run in the order of
// the list.
void order_streams(Step& step);

// Stops with a ProgrammingError naming the action that
// - reads an activation its own micro-batch did not write, or that another has overwritten since;
// - reads or reduces gradients before they are zeroed and complete, or writes them after they were reduced;
// - adds to gradient sums of another unit, or loses some before they are in the gradients;
// - updates a unit before the norm, twice, or never;
// - may run before an action of the other stream that it depends on is done.
void check_step(const Step& step);

// How many micro-batches' activations live at once: the number of slots to lay out.
int slots_in_flight(const Step& step);

// Bytes this rank sends for gradients in one step: the sum over the list's reduce_scatter and all_gather
// actions, where unit u has gradient_bytes[u] bytes, padding included.
std::uint64_t gradient_bytes_sent(const Step& step, std::span<const std::uint64_t> gradient_bytes);

// The list as text, a line an action, for --print-step. `unit_names` as in gpt_units.
std::string to_string(const Step& step, std::span<const std::string> unit_names);

}  // namespace llmc
