// Units: the flat buffers that hold a model's parameters. A list of ParamSpecs describes each unit. No other
// code repeats the shapes. Gradients, master weights and moments use the same layout. Gathers, reductions,
// updates and files take one unit at a time.
//
// A parameter's name is "<unit>.<param>", as in "h.3.attn.c_proj.weight".
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/dtype.h"
#include "llmc/core/tensor.h"

namespace llmc {

// Each rank's number of rows of a vocabulary table is rounded up to a multiple of this.
inline constexpr std::int64_t vocabulary_multiple = 128;

// The initial distribution: normal with mean 0 if `stddev` > 0, uniform in [-bound, bound) if `bound` > 0, else the
// constant `mean`.
struct Init {
    double mean = 0;
    double stddev = 0;
    double bound = 0;
    bool operator==(const Init&) const = default;
};

struct ParamSpec {
    std::string name;  // within the unit
    Shape shape;       // shape of the whole tensor, as in files
    Init init;
    // The dimension along which tensor-parallel ranks divide it equally; none: each has all of it.
    std::optional<int> tensor_dim{};
    // More tensor-parallel ranks than this do not divide it: each has all of it. 0: any number divides it.
    std::int64_t most_ranks = 0;
    // It lies right behind the tensor before it, so that one product reads both as one matrix.
    bool joins_previous = false;
    // On each rank the rows are padded up to a multiple of this; the padding is always zero.
    std::int64_t row_multiple = 1;
    bool transposed_in_files = false;  // Hugging Face's Conv1D has (in, out), this program (out, in)

    // Of how many matrices of products it consists, one behind the other; 0: it is no matrix of a product.
    int matrices = 0;

    // Whether this is a vector: a product's bias (in the shape of its outputs), or a norm's weight or bias.
    // Vectors have no weight decay.
    bool is_vector = false;

    // Training leaves it as it is: it has no gradient and no optimizer.
    bool is_frozen = false;

    // It is kept in 4 bits (device/nf4.h), and is frozen.
    bool is_nf4 = false;

    // Every matrix decays, the embeddings included.
    bool decays() const { return shape.dimensions() >= 2 && !is_vector; }
    // The smallest number of several ranks that have all of it; the largest number if they always divide it.
    std::int64_t replicated_from() const {
        if (!tensor_dim) return 2;
        return most_ranks > 0 ? most_ranks + 1 : std::numeric_limits<std::int64_t>::max();
    }
    // The dimension that this many ranks divide.
    std::optional<int> divided_dim(int ranks) const {
        return ranks > 1 && ranks >= replicated_from() ? std::nullopt : tensor_dim;
    }
    bool operator==(const ParamSpec&) const = default;
};

// A run of elements of a flat buffer.
struct ElementRange {
    std::int64_t begin = 0, end = 0;
    std::int64_t size() const { return end - begin; }
};
// The elements that both ranges contain; empty (begin = end) if there are none.
ElementRange intersection(const ElementRange& a, const ElementRange& b);

// The shape that each of `ranks` ranks stores: with padding, the same on all.
Shape stored_shape(const ParamSpec& spec, int ranks);

// A rank in its tensor-parallel group.
struct TensorRank {
    int rank = 0, size = 1;
    bool operator==(const TensorRank&) const = default;
};

struct UnitSpec {
    std::string name;
    std::vector<ParamSpec> params;

    // All of its tensors are frozen, or none.
    bool is_frozen() const { return !params.empty() && params.front().is_frozen; }
    // So are those that are kept in 4 bits.
    bool is_nf4() const { return !params.empty() && params.front().is_nf4; }
};

// The positions of a unit's tensors in its flat buffer on one tensor-parallel rank. All ranks of a group have
// the same layout. Offsets and sizes are in elements, for every dtype. A tensor starts at a multiple of 128
// elements (256 bytes in bf16), unless it joins the one before. Tensors that the ranks divide come first. The
// replicated tensors follow, and begin a new norm block (norm_block_elements).
class UnitLayout {
  public:
    explicit UnitLayout(UnitSpec spec, TensorRank ranks = {});

    struct Entry {
        ParamSpec spec;
        std::int64_t offset;
        Shape shape;   // shape of this rank's part; the last ranks may have fewer rows than `stored`
        Shape stored;  // with padding, the same on all ranks
    };
    const UnitSpec& spec() const { return spec_; }
    const std::string& name() const { return spec_.name; }
    const std::vector<Entry>& entries() const { return entries_; }
    TensorRank ranks() const { return ranks_; }
    // Up to the end of the last tensor, padding between tensors included.
    std::int64_t elements() const { return elements_; }
    // The start of the tensors that each rank has whole; elements() if there is only one rank.
    std::int64_t replicated_begin() const { return replicated_begin_; }
    // elements(), rounded up so that each of `ranks` equal shards is a whole number of norm blocks.
    std::int64_t padded_elements(int ranks) const;

    const Entry& entry(std::string_view param) const;
    // A tensor of the unit as a view of the unit's flat buffer, in its stored shape.
    Tensor view(const Tensor& flat, std::string_view param) const;
    std::string full_name(const ParamSpec& spec) const { return name() + "." + spec.name; }

  private:
    void add(const ParamSpec& param, bool joins);

    UnitSpec spec_;
    TensorRank ranks_;
    std::vector<Entry> entries_;
    std::int64_t elements_ = 0;
    std::int64_t replicated_begin_ = 0;
};

// How many of its dtype's elements a unit's parameters take: bytes, of a unit in 4 bits.
struct StoredParameters {
    DType dtype;
    std::int64_t elements;
    std::uint64_t bytes() const;
};
StoredParameters stored_parameters(const UnitSpec& unit, std::int64_t elements, DType compute);

// A run of elements that are contiguous both in a rank's part of a tensor and in the whole.
struct TensorRun {
    std::int64_t own, whole, size;  // first element in the part, in the whole; their number
};
std::vector<TensorRun> runs_of(const UnitLayout::Entry& entry, TensorRank ranks);

// Fills `values` with fp32 initial weights of the unit's flat buffer from the element `begin` on. Padding is
// zero. The weights are a pure function of (seed, tensor name, element index), so any mesh starts from the
// same model.
void initialize_unit(std::span<float> values, std::int64_t begin, const UnitLayout& unit, std::uint64_t seed);

}  // namespace llmc
