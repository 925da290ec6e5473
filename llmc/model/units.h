// Units: the flat buffers in which a model's parameters lie. A unit is described by a table of ParamSpecs; nothing outside the
// table repeats a shape, and no parameter is known by an index. Gradients, master weights and moments use the same layout. A
// unit is what is gathered, reduced, updated and saved.
//
// A parameter's name is "<unit>.<param>", as in "h.3.attn.c_proj.weight".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/tensor.h"

namespace llmc {

// Rows of tables of the vocabulary are stored up to a multiple of this on each rank that has some.
inline constexpr std::int64_t vocabulary_multiple = 128;

// Normal with mean 0 where `stddev` > 0, else the constant `mean`.
struct Init {
    double mean = 0;
    double stddev = 0;
    bool operator==(const Init&) const = default;
};

struct ParamSpec {
    std::string name;  // within the unit
    Shape shape;       // of the whole tensor: what files hold
    Init init;
    // Along which dimension tensor-parallel ranks share it, each the same number of entries; none: each has all of it.
    std::optional<int> tensor_dim{};
    std::int64_t row_multiple =
        1;  // rows are stored up to a multiple of this on each rank; the padding is always zero
    bool transposed_in_files = false;  // Hugging Face's Conv1D holds (in, out) where we hold (out, in)

    bool is_bias =
        false;  // a product's bias, in the shape of its outputs, or a norm's weight or bias: does not decay

    // Every matrix decays, the embeddings included.
    bool decays() const { return shape.dimensions() >= 2 && !is_bias; }
    bool operator==(const ParamSpec&) const = default;
};

// What each of so many ranks stores of it: with padding, the same on all.
Shape stored_shape(const ParamSpec& spec, int ranks);

// A rank among those that share each layer.
struct TensorRank {
    int rank = 0, size = 1;
    bool operator==(const TensorRank&) const = default;
};

struct UnitSpec {
    std::string name;
    std::vector<ParamSpec> params;
};

// Where each tensor of a unit lies in its flat buffer, on one of the tensor-parallel ranks, which all have the same
// layout. Offsets and sizes are in elements, so that one layout serves every dtype; a tensor starts at a multiple of 128
// elements (256 bytes in bf16). What ranks share comes first, then, in blocks of the norm of its own, what each has whole.
class UnitLayout {
  public:
    explicit UnitLayout(UnitSpec spec, TensorRank ranks = {});

    struct Entry {
        ParamSpec spec;
        std::int64_t offset;
        Shape shape;  // of this rank's part: fewer rows than others' perhaps, where the last ones are padding
        Shape stored;  // with padding, the same on all ranks
    };
    const UnitSpec& spec() const { return spec_; }
    const std::string& name() const { return spec_.name; }
    const std::vector<Entry>& entries() const { return entries_; }
    TensorRank ranks() const { return ranks_; }
    // Up to the end of the last tensor, padding between tensors included.
    std::int64_t elements() const { return elements_; }
    // Where what each rank has whole begins; elements() if there is only one rank.
    std::int64_t replicated_begin() const { return replicated_begin_; }
    // Rounded up so that each of `ranks` equal shards is a whole number of norm blocks.
    std::int64_t padded_elements(int ranks) const;

    const Entry& entry(std::string_view param) const;
    // A tensor of the unit as a view of the unit's flat buffer, in its stored shape.
    Tensor view(const Tensor& flat, std::string_view param) const;
    std::string full_name(const ParamSpec& spec) const { return name() + "." + spec.name; }

  private:
    void add(const ParamSpec& param);

    UnitSpec spec_;
    TensorRank ranks_;
    std::vector<Entry> entries_;
    std::int64_t elements_ = 0;
    std::int64_t replicated_begin_ = 0;
};

// Runs of elements that lie one after the other in a rank's part of a tensor and in the whole.
struct TensorRun {
    std::int64_t own, whole, size;  // first element in the part, in the whole; how many
};
std::vector<TensorRun> runs_of(const UnitLayout::Entry& entry, TensorRank ranks);

}  // namespace llmc
