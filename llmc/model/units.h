// The model as a list of units: the token embedding `wte` (the head too), the position embedding `wpe`,
// blocks `h.0` ... and the last layernorm `ln_f`. A unit is a flat buffer described by a table of ParamSpecs;
// nothing outside the table repeats a shape, and no parameter is known by an index. Gradients, master weights
// and moments use the same layout. A unit is what is reduced, updated and saved (and later gathered and
// sharded).
//
// Names are GPT-2's: "<unit>.<param>", as in "h.3.attn.c_proj.weight".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/tensor.h"
#include "llmc/model/config.h"

namespace llmc {

// Normal with mean 0 where `stddev` > 0, else the constant `mean`.
struct Init {
    double mean = 0;
    double stddev = 0;
};

struct ParamSpec {
    std::string name;  // within the unit
    Shape shape;       // the tensor's true shape: what files hold
    Init init;
    std::int64_t padding_rows = 0;     // rows after the last that are stored, always zero
    bool transposed_in_files = false;  // Hugging Face's Conv1D holds (in, out) where we hold (out, in)

    Shape stored_shape() const;
    // Every tensor of two dimensions or more decays, the embeddings included.
    bool decays() const { return shape.dimensions() >= 2; }
};

struct UnitSpec {
    std::string name;
    std::vector<ParamSpec> params;
};

// In forward order: wte, wpe, h.0 ... h.L-1, ln_f.
std::vector<UnitSpec> gpt_units(const GPTConfig& config);

// The place of a block in gpt_units; wte and wpe come before.
inline constexpr int wte_unit = 0;
inline constexpr int wpe_unit = 1;
inline constexpr int block_unit(int block) { return 2 + block; }
inline constexpr int ln_f_unit(int layers) { return 2 + layers; }

// Where each tensor of a unit lies in its flat buffer. Offsets and sizes are in elements, so that one layout
// serves every dtype; a tensor starts at a multiple of 128 elements (256 bytes in bf16).
class UnitLayout {
  public:
    explicit UnitLayout(UnitSpec spec);

    struct Entry {
        ParamSpec spec;
        std::int64_t offset;
    };
    const std::string& name() const { return name_; }
    const std::vector<Entry>& entries() const { return entries_; }
    // Up to the end of the last tensor, padding between tensors included.
    std::int64_t elements() const { return elements_; }
    // Rounded up so that each of `ranks` equal shards is a whole number of norm blocks.
    std::int64_t padded_elements(int ranks) const;

    // A tensor of the unit as a view of the unit's flat buffer, in its stored shape.
    Tensor view(const Tensor& flat, std::string_view param) const;
    std::string full_name(const ParamSpec& spec) const { return name_ + "." + spec.name; }

  private:
    std::string name_;
    std::vector<Entry> entries_;
    std::int64_t elements_ = 0;
};

}  // namespace llmc
