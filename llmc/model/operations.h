// The operations with which a model is traced. Each is a row of the table of operations (operations*.cpp,
// head_loss.cpp). Ops (device/ops.h) has their mathematics. A value is known by the number that Trace gave
// it.
#pragma once

#include <optional>
#include <string>

#include "llmc/model/trace.h"

namespace llmc {

// Looks up each token's row of `table` (V, C) and adds the row of its position in `positions` (T, C), if
// given. On several tensor-parallel ranks the result is a partial sum.
int embedding(Trace& t, const ParamSpec& table, const std::optional<ParamSpec>& positions);

// The normalised rows of x, times a weight (C), plus a bias (C) if `has_bias`.
int layernorm(Trace& t, const std::string& name, int x, bool has_bias);
// The same for sum = x + addend.
struct AddNorm {
    int sum, normalised;
};
AddNorm add_layernorm(Trace& t, const std::string& name, int x, int addend, bool has_bias);

// How tensor-parallel ranks divide a product: by its outputs along `output_dim` (`what` names the divided
// things in messages); or, without `output_dim`, by its inputs, so that each computes a partial sum.
struct ProductSplit {
    std::optional<int> output_dim{};
    std::string what{};
};
inline ProductSplit by_outputs(int dim, const char* what) { return {dim, what}; }
inline ProductSplit by_inputs() { return {}; }
// x W^T + b for each token; `outputs` are the dimensions of its result. If W also belongs to another part,
// `tied` is its full name "<unit>.<param>".
int product(Trace& t, const std::string& name, int x, const Shape& outputs, const ProductSplit& split,
            bool has_bias, const Init& init, const std::string& tied = "");
// GELU of a product.
int product_gelu(Trace& t, const std::string& name, int x, const Shape& outputs, const ProductSplit& split,
                 bool has_bias, const Init& init);

// Causal attention of q, k and v (T,3,NH,HS).
int attention(Trace& t, const std::string& name, int qkv);

int add(Trace& t, int a, int b);

// Exchanges between tensor-parallel ranks. `gather` makes the stream of all tokens, before products divided
// by outputs. `scatter` makes the sum of partial sums, after products divided by inputs.
int gather(Trace& t, int stream);
int scatter(Trace& t, int addend);

// Cross-entropy of the rows of x W^T against the targets. W (V,C) is tied if another part has it too.
void head_loss(Trace& t, int x, const ParamSpec& table, bool is_tied);

}  // namespace llmc
