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
#include "llmc/model/recompute.h"
#include "llmc/parallel/sharding.h"

namespace llmc {

enum class ActionKind {
    load,               // the tokens of a micro-batch to the device
    gather_parameters,  // a unit's parameters: every rank of the group receives all shards
    release,            // a unit's whole parameters may be overwritten: where they lie, another's turn comes
    zero,               // what the backward pass adds a unit's gradients to = 0
    forward,            // a part of the model; the head's forward alone makes losses only
    recompute,          // of a block: what it did not keep of its forward
    backward,           // the same part's; the head's includes its forward, since its logits are not kept
    logits,             // the head's forward for one position
    round,              // a unit's gradients = its gradient sums, rounded
    accumulate,         // a unit's gradients += its gradient sums, rounded
    reduce_scatter,     // a unit's gradients: each rank receives its shard of the sum over the group
    all_reduce,         // a unit's shard, summed over the groups
    accumulate_shard,   // a unit's shard of the sum += that of this micro-batch
    gather_gradients,   // a unit's gradients: every rank receives the summed shards
    reduce_loss,        // the loss summed over ranks
    square,             // the sums of squares of this rank's shards of all gradients
    gather_squares,     // those of the whole group
    norm,               // the squared norm of all gradients, from the sums
    update,             // AdamW on what a rank has of a unit's optimizer state
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
    parameters,       // whole; index: place_of_parameters(unit)
    parameter_shard,  // index: unit; where it is no part of whole ones
    gradients,        // whole; index: place_of_gradients(unit)
    gradient_shard,   // index: unit; where it is no part of whole ones
    gradient_sums,    // index: place_of_gradient_sums(unit); of a micro-batch, in fp32, for gradients in bf16
    optimizer,        // index: unit; master weights and moments
    tokens,           // inputs and targets
    residual,         // index: l, the input of block l (of the head for l = L)
    saved,            // index: block; what its backward needs beside the residual
    recomputed,       // index: 0; what blocks that recompute share. unit: the block's unit, whose it is now
    residual_gradient,  // the gradient that flows back along the residual stream
    logits,             // of one position
    loss,               // of the micro-batches so far, then of all ranks
    squares,            // the gradients' sums of squares, block by block
    norm,
};

struct BufferUse {
    BufferRole role;
    int index = 0;
    int unit = -1;  // whose numbers these are, for buffers of units
    bool operator==(const BufferUse&) const = default;
};

struct Action {
    ActionKind kind;
    StreamKind stream = StreamKind::compute;
    Part part{};           // forward, recompute, backward
    int unit = -1;         // of all that concerns one unit
    int micro_batch = -1;  // load, forward, recompute, backward, logits
    int slot = 0;          // where the micro-batch's activations lie
    std::vector<BufferUse> reads;
    std::vector<BufferUse> writes;
    // The last earlier action of the other stream that must be done first, by its place in the list; -1 for
    // none. A stream runs its own actions in their order.
    int after = -1;
};

struct Step {
    int layers = 0;
    Sharding sharding{};
    Recompute recompute{};
    int micro_batches = 0;
    std::vector<Action> actions;
};

// Sets every action's `after`: two actions that use the same buffer, one of them writing it, run in the order of
// the list.
void order_streams(Step& step);

// Stops with a ProgrammingError naming the action that
// - reads an activation its own micro-batch did not write, or that another has overwritten since;
// - reads what another block, or the same one for another micro-batch, has computed where those that recompute share memory;
// - reads parameters that are not gathered or of another unit, or gathers over some that are in use;
// - reads or reduces gradients before they are zeroed and complete, or writes them after they were reduced;
// - writes gradients of a unit over another's, or over its own, that have not been reduced or added up;
// - adds to gradient sums of another unit, or loses some before they are in the gradients;
// - updates a unit before the norm, twice, or never;
// - may run before an action of the other stream that it depends on is done.
void check_step(const Step& step);

// How many micro-batches' activations live at once: the number of slots to lay out.
int slots_in_flight(const Step& step);

// Bytes of a unit's whole flat buffers, padding included.
struct UnitBytes {
    std::uint64_t parameters = 0, gradients = 0;
};
// Bytes this rank sends for gradients and parameters in one run of a list.
struct BytesSent {
    std::uint64_t inside = 0;  // its group
    std::uint64_t across = 0;  // the groups
};
BytesSent bytes_sent(const Step& step, std::span<const UnitBytes> units);

// Whether it takes all ranks to run a list.
bool communicates(const Step& step);

// The list as text, a line an action, for --print-step. `unit_names` as in gpt_units.
std::string to_string(const Step& step, std::span<const std::string> unit_names);

}  // namespace llmc
