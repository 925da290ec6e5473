// Describes a training step as data: the list of actions that one rank performs in one optimizer step. Step
// also holds the lists for evaluation, generation, diagnosis and gathers, which update nothing. Each action
// names the buffers that it reads and writes, and its stream. build_step.h makes the list, and executor.h
// runs it. The checks, the byte count, the sizes of the activation buffers and `--print-step` read it.
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/device/device.h"
#include "llmc/model/part_lists.h"
#include "llmc/model/tensor_parallel.h"
#include "llmc/parallel/pipeline/stage.h"
#include "llmc/parallel/step/action_kind.h"
#include "llmc/parallel/zero/sharding.h"

namespace llmc {

// A kind of buffer that actions read and write. Parameters, gradients and optimizer state belong to a unit.
// Tokens, residuals and saved activations belong to a micro-batch. They lie in its slot, which a later
// micro-batch reuses.
enum class BufferRole {
    // A unit's whole parameters. Index: place_of_parameters(unit).
    parameters,
    // This rank's shard, if it is no part of the whole parameters. Index: place_of_parameter_shard(unit).
    parameter_shard,
    // A unit's whole gradients. Index: place_of_gradients(unit).
    gradients,
    // This rank's shard, if it is no part of the whole gradients. Index: unit.
    gradient_shard,
    // One micro-batch's fp32 sums, for bf16 gradients. Index: place_of_gradient_sums(unit).
    gradient_sums,
    // Master weights and moments. Index: unit; on disk, the number of the piece in the whole model.
    optimizer,
    // Inputs and targets, by micro-batch.
    tokens,
    // Residual stream before a chunk's first part with an input. Index: buffer * number of widths + width.
    chunk_input,
    // Output of the l-th of the chunk's parts that have an input. Index: l, from 1.
    residual,
    // The other activations that this part's backward pass reads. Index: l - 1; -1: the part that takes
    // tokens.
    saved,
    // Memory that recomputing parts share. Index: their kind. Unit: the part that uses it now.
    recomputed,
    // Values that backward_input keeps for backward_weight. Index: buffer * split_kinds + split_number.
    output_gradients,
    // Gradient of the residual stream. Index: buffer * number of widths + width.
    residual_gradient,
    // Residual stream of a few rows, in the memory of residual_gradient. Index: its width.
    rows,
    // Logits of one row.
    logits,
    // Sum of the losses of the micro-batches so far, then of all ranks.
    loss,
    // Sums of squares of the gradients, one for each norm block.
    squares,
    norm,
    // The greatest magnitudes that this step has seen (Space::amax).
    amax,
    // The directions of a unit's matrices: of all ranks that share them; in the host's memory this rank's. Units take
    // turns. Index: 0.
    directions,
    // Holds a piece of optimizer state on its way from the disk and back. Index: the buffer.
    state_piece,
};

// Where parameters, gradients and optimizer state may lie beside the device, their index is: of parameters in the
// host's memory, place_of_host_parameters(unit); otherwise the unit.
struct BufferUse {
    BufferRole role;
    int index = 0;
    int unit = -1;  // for buffers of units and `recomputed`: the unit or part whose values these are
    Tier tier = Tier::device;
    bool operator==(const BufferUse&) const = default;
};

struct Action {
    ActionKind kind;
    StreamKind stream = StreamKind::compute;
    // Forward, recompute, backward: the part of the model.
    int part = -1;
    // For actions on one unit, and on a piece of its optimizer state.
    int unit = -1, piece = -1;
    int round = -1;  // Accumulate: which of the unit's rounds it adds. They count from 0 in a step.
    // Load, forward, backward, logits, transfers between stages.
    int micro_batch = -1;
    // For the same actions: the position among the stage's chunks (Pass::chunk counts in the whole model).
    int chunk = 0;
    // Holds the activations of a chunk and micro-batch.
    int slot = 0;
    bool is_of_update = false;  // of the pending update: left out if there is none
    std::vector<BufferUse> reads{};
    std::vector<BufferUse> writes{};
    // The actions that must be done first, as positions in the list: the last such action of each other
    // stream. A stream runs its own actions in the order of the list.
    std::vector<int> after{};
};

struct Step {
    StagePart part{};
    int stage = 0, stages = 1;
    Sharding sharding{};
    TensorSplit tensor{};
    Recompute recompute{};
    int micro_batches = 0;
    std::vector<Action> actions{};

    const Chunk& chunk_of(const Action& action) const {
        return part.chunks[static_cast<std::size_t>(action.chunk)];
    }
};

// Sets every action's `after`: two actions that use the same buffer run in the order of the list, if one of
// them writes it.
void order_streams(Step& step);

// Throws a ProgrammingError that names the first action with one of these faults:
// - It reads an activation that its micro-batch did not write, or that another has overwritten since.
// - It reads recomputed activations of another block or micro-batch, where blocks share that memory.
// - It reads parameters that are not gathered or are another unit's, or recomputes without any.
// - It gathers parameters over others that are in use.
// - It reads or reduces gradients before they are zeroed and complete, or writes them after their reduction.
// - It overwrites gradients, its own or another unit's, that have not been reduced or added up.
// - It adds to another unit's gradient sums, or loses some before they are in the gradients.
// - It reads parameters before their update, or updates a unit twice; or the list never updates a unit.
// - It makes the norm of gradients that lack other stages or ranks; or the list never makes it.
// - It updates a piece of state that is not in its buffer, or loses one that the disk lacks.
// - It reads parameters where a copy elsewhere is newer, overwrites others that are in use, or loses some that the host
//   or the disk lacks.
// - It makes the norm without some gradients, or of some that the host lacks where it updates.
// - It may run before an action of another stream on which it depends is done.
void check_step(const Step& step);
// Checks the lists of all stages together. Throws a ProgrammingError if a stage receives something other than
// what was sent to it, or if stages deadlock.
void check_stages(std::span<const Step> stages);

// How many buffers of each kind the list uses at once.
struct BuffersInFlight {
    int slots = 1;
    int chunk_inputs = 1;
    int residual_gradients = 1;
    int output_gradients = 0;
    int tokens = 1;  // micro-batches whose tokens are needed
    // For each slot that a backward pass reads: the first part with an input of a chunk that uses the slot.
    // Other chunks that use it keep the same activations. The model's first part has no input, so a slot
    // without an entry gets part 1.
    std::vector<int> first_parts{};
    // For each slot: how many outputs of parts it holds; without an entry, all. On a single stage, the last output of a
    // chunk lies in the next chunk's input.
    std::vector<int> residuals{};

    int first_part(int slot) const {
        const auto index = static_cast<std::size_t>(slot);
        return index < first_parts.size() ? first_parts[index] : 1;
    }
    bool holds_output(int slot, int place) const {
        const auto index = static_cast<std::size_t>(slot);
        return index >= residuals.size() || place < residuals[index];
    }
};
BuffersInFlight buffers_in_flight(const Step& step);

// Bytes of a unit's whole flat buffers, padding included.
struct UnitBytes {
    std::uint64_t parameters = 0, gradients = 0;
    std::uint64_t replicated_gradients = 0;  // those of tensors that each tensor-parallel rank has whole
    std::uint64_t gradient_size = 4;         // bytes of one element
    std::uint64_t directions = 0;            // of one tensor-parallel rank
};
// Bytes that a rank sends inside its sharding group to all-gather or reduce-scatter a buffer, and then
// between the groups to all-reduce its shard.
inline std::uint64_t bytes_inside(std::uint64_t whole, const Sharding& sharding) {
    const auto shards = static_cast<std::uint64_t>(sharding.shards);
    return whole / shards * (shards - 1);
}
inline std::uint64_t bytes_across(std::uint64_t whole, const Sharding& sharding) {
    const auto replicas = static_cast<std::uint64_t>(sharding.replicas);
    return 2 * (whole / static_cast<std::uint64_t>(sharding.ranks())) * (replicas - 1);
}

// Bytes that this rank sends in one run of a list: gradients, parameters, and activations between stages and
// in the tensor-parallel group.
struct BytesSent {
    std::uint64_t inside = 0;  // within its sharding group
    std::uint64_t across = 0;  // between these groups
    std::uint64_t tied = 0;    // gradients, between stages that have the same unit
    std::uint64_t stages = 0;  // to the stages before and after
    std::uint64_t tensor = 0;  // to the tensor-parallel group

    std::uint64_t total() const { return inside + across + tied + stages + tensor; }
};
BytesSent bytes_sent(const Step& step, std::span<const UnitBytes> units, const ModelLists& lists);

// Whether a list has actions on other streams than `compute`, and whether it needs other ranks.
bool has_streams(const Step& step);
bool communicates(const Step& step);

// Whether an action's stream is one of the disk's.
bool is_on_disk(const Action& action);
// Whether an action is only begun, and is done later: transfers between stages, and of the disk.
bool is_begun_only(const Action& action);
// Whether it copies a unit's parameters from one tier to another.
bool moves_parameters(ActionKind kind);

// Whether an action is a transfer between pipeline stages.
bool is_between_stages(ActionKind kind);

// The list as text, one line per action, for --print-step. If `is_whole` is false, lines that repeat for
// consecutive layers are printed once.
std::string to_string(const Step& step, bool is_whole = true);

// Which memory an action's buffers use, for code that follows a list from action to action.

bool belongs_to_unit(BufferRole role);
bool belongs_to_micro_batch(BufferRole role);
// Whether each micro-batch in flight has buffers of its own.
bool lies_in_slot(BufferRole role);

// Identifies memory: two uses with equal places use the same memory.
struct BufferPlace {
    BufferRole role;
    int index;
    int slot;  // the slot, for buffers of a micro-batch; else 0
    Tier tier;
    auto operator<=>(const BufferPlace&) const = default;
};
inline BufferPlace place_of(const Action& action, const BufferUse& use) {
    const int owner = use.role == BufferRole::tokens ? action.micro_batch
                      : lies_in_slot(use.role)       ? action.slot
                                                     : 0;
    return {use.role, use.index, owner, use.tier};
}

// For each action, the last earlier action of each other stream that it must wait for.
std::vector<std::vector<int>> dependencies(const Step& step);

}  // namespace llmc
