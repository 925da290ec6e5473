// The operations that a model is traced with; each is a row of the table in operations.cpp. Ops (device/ops.h) has their
// mathematics. A value is the number that Trace gave it.
#pragma once

#include <optional>
#include <string>

#include "llmc/model/trace.h"

namespace llmc {

// The rows of a table (rows, C) of the tokens, and of a table (T, C) of positions, added: an addend.
int embedding(Trace& t, const ParamSpec& table, const std::optional<ParamSpec>& positions);

// The normalised rows of x, times a weight (C), and with a bias (C).
int layernorm(Trace& t, const std::string& name, int x, bool has_bias);
// The same of sum = x + addend.
struct AddNorm {
    int sum, normalised;
};
AddNorm add_layernorm(Trace& t, const std::string& name, int x, int addend, bool has_bias);

// How ranks share a product: its outputs, of which this dimension is divided (and what that is, for a person), or its inputs,
// so that each makes an addend.
struct ProductSplit {
    std::optional<int> output_dim{};
    std::string what{};
};
inline ProductSplit by_outputs(int dim, const char* what) { return {dim, what}; }
inline ProductSplit by_inputs() { return {}; }
// x W^T + b for each token; `outputs` are its dimensions. Where W is another part's too, `tied` is its name with its unit's.
int product(Trace& t, const std::string& name, int x, const Shape& outputs, const ProductSplit& split,
            bool has_bias, const Init& init, const std::string& tied = "");
// GELU of that.
int product_gelu(Trace& t, const std::string& name, int x, const Shape& outputs, const ProductSplit& split,
                 bool has_bias, const Init& init);

// Causal attention of q, k and v (T,3,NH,HS).
int attention(Trace& t, const std::string& name, int qkv);

int add(Trace& t, int a, int b);

// What tensor-parallel ranks exchange: the stream of all tokens, before products that they share by outputs; the sum of
// their addends, behind products that they share by inputs.
int gather(Trace& t, int stream);
int scatter(Trace& t, int addend);

// Cross-entropy of the rows of x W^T against the targets; W (V,C) is tied, where another part has it too.
void head_loss(Trace& t, int x, const ParamSpec& table, bool is_tied);

}  // namespace llmc
