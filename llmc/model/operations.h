// The operations with which a model is traced. Each is a row of the table of operations (operations*.cpp,
// head_loss.cpp). Ops (device/ops.h) has their mathematics. A value is known by the number that Trace gave
// it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "llmc/device/ops.h"
#include "llmc/model/trace.h"

namespace llmc {

// The table of a vocabulary: the token embedding, or that of a head. Ranks divide its V rows.
ParamSpec vocabulary_table(const std::string& name, std::int64_t vocabulary, std::int64_t channels,
                           const Init& init);

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

// The rows of x divided by their root mean square, times a weight (C) if `has_weight`.
int rmsnorm(Trace& t, const std::string& name, int x, bool has_weight, double eps);
// The same for sum = x + addend.
AddNorm add_rmsnorm(Trace& t, const std::string& name, int x, int addend, bool has_weight, double eps);

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

// A matrix of a packed product: the beginning of its parameters' names, and the things along its outputs.
struct PackedMatrix {
    std::string name;
    Piece things;
};
// Several products of x, side by side: (T, all things, thing). `thing` is the shape of a thing's outputs: (D)
// for a head, () for a channel. Each has a matrix of its own, and a bias if has_bias; one product reads all.
int packed_product(Trace& t, const std::string& name, int x, const std::vector<PackedMatrix>& matrices,
                   const Shape& thing, bool has_bias, const Init& init);

// With the halves a and b of the packed values x (T, 2F): a s(a) b, with the logistic function s.
int swiglu(Trace& t, const std::string& name, int x);
// max(x, 0)^2
int relu_squared(Trace& t, const std::string& name, int x);

// The heads in packed values (T, H+2K, D): H of queries, then K of keys and K of values. Query head h attends
// to key head h K / H.
struct HeadCounts {
    std::int64_t queries, keys;  // H, K
    bool operator==(const HeadCounts&) const = default;
};
// The product of packed values, with Hugging Face's names "<name>.q_proj.weight", k_proj and v_proj.
int qkv_product(Trace& t, const std::string& name, int x, const HeadCounts& heads, std::int64_t head_size,
                bool has_bias, const Init& init);
// The root-mean-square norm of the query and key heads of packed values, with weights q and k unless these
// names are empty: (T, H+K, D). With `over_all`, of all query heads together, and of all key heads together;
// else of each head, with one weight (D) for all.
struct HeadNorm {
    std::string q{}, k{};
    bool over_all = false;
    double eps = 0;
};
int head_norm(Trace& t, int packed, const HeadCounts& heads, const HeadNorm& norm);
// Rotates the query and key heads, the first H+K of x; by the negative angles if `inverse`.
int rope(Trace& t, int x, const HeadCounts& heads, const RopeAngles& angles, bool inverse = false);
// Causal attention of packed values. If the query and key heads lie in another value (T, H+K, D), `qk` is that
// one. With a window W > 0, row t sees keys t-W+1 to t.
int attention(Trace& t, const std::string& name, int qkv, const HeadCounts& heads, std::int64_t window = 0,
              std::optional<int> qk = {});

int add(Trace& t, int a, int b);

// Exchanges between tensor-parallel ranks. `gather` makes the stream of all tokens, before products divided
// by outputs. `scatter` makes the sum of partial sums, after products divided by inputs.
int gather(Trace& t, int stream);
int scatter(Trace& t, int addend);

// Cross-entropy of the rows of x W^T against the targets. W (V,C) is tied if another part has it too.
void head_loss(Trace& t, int x, const ParamSpec& table, bool is_tied, const ClassifierTerms& terms = {});

}  // namespace llmc
