// Derives from a part's trace its lists of calls, one for each of its passes, and the memory that they need.
// They depend on the tensor-parallel split, the dtype and the size of micro-batches.
//
// The operands of calls lie in a few spaces (PartMemory). Values that the backward pass needs are kept from
// the forward pass; cheap ones may be recomputed (Recompute). All others are in scratch memory, which all
// parts share. It has as many buffers of a width as are in use at once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "llmc/core/tensor.h"
#include "llmc/core/text.h"
#include "llmc/model/operation.h"
#include "llmc/model/trace.h"

namespace llmc {

// The activations that blocks recompute for their backward pass instead of keeping them. This saves memory
// and costs time. Results do not change: the same operations on the same rounded inputs give the same bits.
// A matrix that layers of several pipeline stages share is an exception: with recompute, stages may get
// other layers, and the sum of its gradients another order.
enum class RecomputeKind {
    none,       // Blocks keep all activations.
    selective,  // Blocks recompute the outputs of layernorms and GELU, which are cheap.
    block       // Blocks keep only their input.
};
constexpr std::string_view name_of(RecomputeKind kind) {
    return name_among(kind, "none", "selective", "block");
}

struct Recompute {
    RecomputeKind kind = RecomputeKind::none;
    std::int64_t every = 1;  // the last block of each group of this many recomputes

    // How a block recomputes, by its number in the whole model. It does not depend on which blocks a rank
    // has.
    constexpr RecomputeKind of(std::int64_t block) const {
        return block % every == every - 1 ? kind : RecomputeKind::none;
    }
    constexpr bool recomputes(std::int64_t block) const { return of(block) != RecomputeKind::none; }
    bool operator==(const Recompute&) const = default;
};

enum class Space : std::uint8_t {
    none,
    input,           // the residual stream before the part
    output,          // the stream after it
    input_gradient,  // the gradients of these; one buffer if both have the same width
    output_gradient,
    kept_input,  // for generation: the stream of all rows so far, if keys and values are not kept
    kept,
    scratch,
    kept_gradient,  // from the first half of the backward pass to the second
    parameter,
    parameter_gradient,
    tokens,
    targets,
    angles,
    amax  // two for each operand of products in 8 bits (fp8_operands)
};
inline constexpr std::size_t number_of_spaces = static_cast<std::size_t>(Space::amax) + 1;

// How much of its buffer an operand uses.
enum class Extent : std::uint8_t {
    batch,  // The sequences of this run.
    fixed,  // All of it.
    one,    // One sequence. This and the following are for generation.
    rows,   // The new rows.
    known,  // All rows up to the last new one.
    tail    // The new rows, at the end of the buffer with all known rows.
};

struct ListOperand {
    Space space = Space::none;
    Extent extent = Extent::batch;
    Access access = Access::read;
    bool is_own_tokens = false;
    bool on_first_rank_only = false;
    int index = 0;
    DType dtype = DType::fp32;
    Shape shape{};
    int storage = -1, version = 0, read_version = 0;  // its contents, for checks
};

struct ListCall {
    const Node* node = nullptr;
    std::string_view name;
    RunCall run = nullptr;
    std::vector<ListOperand> operands;
    std::uint64_t sent = 0;  // bytes, to tensor-parallel ranks
};
inline constexpr std::size_t most_operands = 10;  // the most that a call has
using List = std::vector<ListCall>;

struct PartBuffer {
    std::string name, label;
    DType dtype;
    Shape shape;
    bool is_cheap = false;  // to recompute
    int value = -1;         // -1: none
};

// Memory that parts share: scratch buffers, one or more for each width, and constant tables of angles.
struct Scratch {
    struct Buffer {
        std::int64_t width;
        DType dtype;
        Shape shape;  // shape of the largest value in it
    };
    std::vector<Buffer> buffers;
    std::vector<RopeAngles> angles;  // each is filled once, before the first step
};

struct PartLists {
    const Part* part = nullptr;
    PartSizes sizes;
    std::vector<PartBuffer> kept, kept_gradients;
    std::vector<std::string> storages;  // the names of the storages of all lists, for checks

    // For the part that makes losses, `backward` includes the forward pass, and `forward` computes only the
    // losses. Its kept values have buffers of their own (ActivationBuffers::losses).
    List forward, backward;
    // The backward pass in two halves.
    List backward_input, backward_weight;
    // Recompute only the cheap values (selective), or all kept values (block).
    List recompute_cheap, recompute;
    // For generation: with keys and values kept, and with the part's input kept.
    List rows, rows_of_all;
    int losses = -1, logits = -1;  // indices in `kept`

    const List& recompute_of(RecomputeKind kind) const {
        return kind == RecomputeKind::block ? recompute : recompute_cheap;
    }
    bool is_kept(std::size_t buffer, RecomputeKind kind) const {
        return kind == RecomputeKind::none || (kind == RecomputeKind::selective && !kept[buffer].is_cheap);
    }
};

// The shape of a value on one rank, for a micro-batch: (B,T,C), or (B,T/R,C).
Shape own_shape(const Value& value, const PartSizes& sizes);

// Derives a part's lists, and adds the memory that they need to the scratch memory. The part must outlive the
// lists.
PartLists derive_lists(const Part& part, const PartSizes& sizes, Scratch& scratch);

// Checks a part's lists in every order in which a step runs them. Throws a ProgrammingError that names the
// operation if a call reads a value that nobody made, or that another call has overwritten.
void check_lists(const PartLists& lists);

// The products of a part that may be in 8 bits. Their numbers are in the order of their nodes.
int fp8_products(const Part& part);

bool reads_parameters(const List& list);
std::uint64_t bytes_sent(const List& list);

// First bytes of the buffers of a part's operands. A space has one buffer, or one for each index.
struct PartMemory {
    using Buffers = std::span<std::byte* const>;
    std::array<std::byte*, number_of_spaces> one{};
    std::array<Buffers, number_of_spaces> many{};

    std::byte*& operator[](Space space) { return one[static_cast<std::size_t>(space)]; }
    Buffers& all(Space space) { return many[static_cast<std::size_t>(space)]; }
};

// Runs a call, or all calls of a list, for `sequences` sequences.
void run_call(const ListCall& call, const PartMemory& memory, std::int64_t sequences, Running running);
void run_list(const List& list, const PartMemory& memory, std::int64_t sequences, const Running& running);
// One operand of a list as a tensor; empty if this rank does not have it.
Tensor tensor_of(const ListOperand& operand, const PartMemory& memory, std::int64_t sequences,
                 const Running& running);

}  // namespace llmc
