// What a part's trace makes it do: lists of calls for its passes, and the memory that these need. All of it is derived here,
// for one way to share the layers, one dtype and one size of micro-batches.
//
// A list's calls find their operands in a few spaces (PartMemory). What the backward pass needs is kept from the forward pass;
// what takes little to make again may be made again (recompute.h). All else is scratch memory, of which parts share one buffer
// for each width and each time that two are needed at once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "llmc/core/tensor.h"
#include "llmc/model/operation.h"
#include "llmc/model/recompute.h"
#include "llmc/model/trace.h"

namespace llmc {

enum class Space : std::uint8_t {
    none,
    input,           // the stream before the part
    output,          // and behind it
    input_gradient,  // their gradients, which are one buffer where both are as wide
    output_gradient,
    kept_input,  // of generation: the stream of all rows so far, where keys and values are not kept
    kept,
    scratch,
    kept_gradient,  // from the first part of the backward pass to the second
    parameter,
    parameter_gradient,
    tokens,
    targets
};
inline constexpr std::size_t number_of_spaces = static_cast<std::size_t>(Space::targets) + 1;

// How much of its memory an operand is.
enum class Extent : std::uint8_t {
    batch,  // the sequences of this run
    fixed,  // all of it
    one,    // one sequence; the rest is of generation:
    rows,   // the new rows
    known,  // all rows up to the last new one
    tail    // the new ones among these
};

struct ListOperand {
    Space space = Space::none;
    Extent extent = Extent::batch;
    Access access = Access::read;
    bool is_own_tokens = false;
    bool is_of_one = false;
    int index = 0;
    DType dtype = DType::fp32;
    Shape shape{};
    int storage = -1, version = 0;  // what is there, for checks
};

struct ListCall {
    const Node* node = nullptr;
    std::string_view name;
    RunCall run = nullptr;
    std::vector<ListOperand> operands;
    std::uint64_t sent = 0;  // bytes, to tensor-parallel ranks
};
inline constexpr std::size_t most_operands = 10;  // of a call
using List = std::vector<ListCall>;

struct PartBuffer {
    std::string name, label;
    DType dtype;
    Shape shape;
    bool is_cheap = false;  // to make again
};

// Scratch memory that parts share, by the width of what it is for.
struct Scratch {
    struct Buffer {
        std::int64_t width;
        DType dtype;
        Shape shape;  // of the largest that lies there
    };
    std::vector<Buffer> buffers;
};

struct PartLists {
    const Part* part = nullptr;
    PartSizes sizes;
    std::vector<PartBuffer> kept, kept_gradients;
    std::vector<std::string> storages;  // of all lists: their names, for checks

    // Losses' forward pass runs in their backward pass too: `backward` includes it, and the part keeps its own.
    List forward, backward;
    List backward_input, backward_weight;  // the same in two parts
    List recompute_cheap, recompute;       // what is cheap to make again; all that is kept
    List rows, rows_of_all;        // generation, with keys and values kept; and with the part's input kept
    int losses = -1, logits = -1;  // of what is kept

    const List& recompute_of(RecomputeKind kind) const {
        return kind == RecomputeKind::block ? recompute : recompute_cheap;
    }
    bool is_kept(std::size_t buffer, RecomputeKind kind) const {
        return kind == RecomputeKind::none || (kind == RecomputeKind::selective && !kept[buffer].is_cheap);
    }
};

// Of a micro-batch, on one rank: (B,T,C), or (B,T/R,C).
Shape own_shape(const Value& value, const PartSizes& sizes);

// Adds to the scratch memory what the part needs. The part outlives the lists.
PartLists derive_lists(const Part& part, const PartSizes& sizes, Scratch& scratch);

// ProgrammingError that names the operation where a call reads what is not there: what nobody made, or what another call has
// overwritten since, in any order in which a step runs the lists.
void check_lists(const PartLists& lists);

bool reads_parameters(const List& list);
std::uint64_t bytes_sent(const List& list);

// Where a part's operands are: first bytes, whole buffers. A space has one buffer, or one for each index.
struct PartMemory {
    using Buffers = std::span<std::byte* const>;
    std::array<std::byte*, number_of_spaces> one{};
    std::array<Buffers, number_of_spaces> many{};

    std::byte*& operator[](Space space) { return one[static_cast<std::size_t>(space)]; }
    Buffers& all(Space space) { return many[static_cast<std::size_t>(space)]; }
};

// Calls them all, for so many sequences; `running` says the rest.
void run_list(const List& list, const PartMemory& memory, std::int64_t sequences, const Running& running);
// One of a list's operands; empty where this rank has none.
Tensor tensor_of(const ListOperand& operand, const PartMemory& memory, std::int64_t sequences,
                 const Running& running);

}  // namespace llmc
