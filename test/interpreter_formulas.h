// The formulas of llmc/device/ops.h in fp64, one function for each direction of each operation that models are traced
// from: the parts of test/interpreter.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <numbers>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/standard_library.h"
#include "llmc/device/ops.h"
#include "llmc/model/model.h"
#include "llmc/model/operation.h"

namespace llmc::interpreter {

using Numbers = std::vector<double>;
using Parameters = std::map<std::string, Numbers>;  // by full names, "h.0.ln_1.weight"; a tied tensor appears
                                                    // once

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// The operands of a node: all values and parameters of its part, and their gradients.
struct Use {
    const Part& part;
    const Node& node;
    std::int64_t sequences;
    std::span<const std::int32_t> tokens, targets;
    std::vector<Numbers>&values, &gradients;                 // values of the part, and their gradients
    std::vector<Numbers*>&parameters, &parameter_gradients;  // parameters of the part, and their gradients

    Numbers& in(int i) const { return values[at(node.in[at(i)])]; }
    Numbers& out(int i) const { return values[at(node.out[at(i)])]; }
    Numbers& din(int i) const { return gradients[at(node.in[at(i)])]; }
    const Numbers& dout(int i) const { return gradients[at(node.out[at(i)])]; }
    bool has(int i) const { return at(i) < node.parameters.size() && node.parameters[at(i)] >= 0; }
    const Numbers& parameter(int i) const { return *parameters[at(node.parameters[at(i)])]; }
    Numbers& dparameter(int i) const { return *parameter_gradients[at(node.parameters[at(i)])]; }
    std::int64_t rows() const { return sequences * part.tokens; }
    std::int64_t features_in() const { return part.value(node.in[0]).features(); }
    std::int64_t features_out() const { return part.value(node.out[0]).features(); }
};

inline void add_to(Numbers& sum, const Numbers& x) {
    for (std::size_t i = 0; i < x.size(); ++i) sum[i] += x[i];
}

// ---- embedding

// f(element of the output, of the table's row, of the position's row)
template <class F>
void for_each_embedded(const Use& u, F&& f) {
    const std::int64_t C = u.features_out();
    for (std::int64_t row = 0; row < u.rows(); ++row) {
        for (std::int64_t c = 0; c < C; ++c)
            f(at(row * C + c), at(u.tokens[at(row)] * C + c), at(row % u.part.tokens * C + c));
    }
}
inline void embedding(const Use& u) {
    for_each_embedded(u, [&](std::size_t i, std::size_t token, std::size_t position) {
        u.out(0)[i] = u.parameter(0)[token] + (u.has(1) ? u.parameter(1)[position] : 0);
    });
}
inline void embedding_backward(const Use& u) {
    for_each_embedded(u, [&](std::size_t i, std::size_t token, std::size_t position) {
        u.dparameter(0)[token] += u.dout(0)[i];
        if (u.has(1)) u.dparameter(1)[position] += u.dout(0)[i];
    });
}

// ---- layernorm

// Writes the row's h = (x - mean) rstd to `h`; returns rstd.
inline double normal_of(const Numbers& x, std::int64_t row, Numbers& h) {
    const auto count = static_cast<double>(h.size());
    double mean = 0, variance = 0;
    for (std::size_t c = 0; c < h.size(); ++c) mean += (h[c] = x[at(row) * h.size() + c]) / count;
    for (double& a : h) variance += std::pow(a -= mean, 2) / count;
    const double rstd = 1 / std::sqrt(variance + 1e-5);
    for (double& a : h) a *= rstd;
    return rstd;
}
inline void normalise(const Use& u, const Numbers& x, Numbers& out) {
    Numbers h(at(u.features_out()));
    for (std::int64_t row = 0; row < u.rows(); ++row) {
        normal_of(x, row, h);
        for (std::size_t c = 0; c < h.size(); ++c)
            out[at(row) * h.size() + c] = h[c] * u.parameter(0)[c] + (u.has(1) ? u.parameter(1)[c] : 0);
    }
}
inline void normalise_backward(const Use& u, const Numbers& x, const Numbers& dout, Numbers& dx) {
    Numbers h(at(u.features_out())), g(h.size());
    for (std::int64_t row = 0; row < u.rows(); ++row) {
        const double rstd = normal_of(x, row, h), count = static_cast<double>(h.size());
        const std::size_t first = at(row) * h.size();
        double sum = 0, sum_h = 0;
        for (std::size_t c = 0; c < h.size(); ++c) {
            g[c] = dout[first + c] * u.parameter(0)[c];
            sum += g[c] / count;
            sum_h += g[c] * h[c] / count;
            u.dparameter(0)[c] += dout[first + c] * h[c];
            if (u.has(1)) u.dparameter(1)[c] += dout[first + c];
        }
        for (std::size_t c = 0; c < h.size(); ++c) dx[first + c] += rstd * (g[c] - sum - h[c] * sum_h);
    }
}
inline void layernorm(const Use& u) { normalise(u, u.in(0), u.out(0)); }
inline void layernorm_backward(const Use& u) { normalise_backward(u, u.in(0), u.dout(0), u.din(0)); }
inline void add(const Use& u) {
    for (std::size_t i = 0; i < u.out(0).size(); ++i) u.out(0)[i] = u.in(0)[i] + u.in(1)[i];
}
inline void add_backward(const Use& u) {
    for (const int i : {0, 1}) add_to(u.din(i), u.dout(0));
}
inline void add_layernorm(const Use& u) {
    add(u);
    normalise(u, u.out(0), u.out(1));
}
inline void add_layernorm_backward(const Use& u) {
    Numbers sum(u.out(0).size());
    normalise_backward(u, u.out(0), u.dout(1), sum);
    for (const int i : {0, 1}) add_to(u.din(i), sum);
    add_backward(u);
}

// ---- the root-mean-square norm

// Norms n elements of x from `from` on, to those of `out` from `to` on.
struct Norm {
    std::size_t from, to, n;
    double eps;
    const Numbers* weight = nullptr;  // null: 1

    double rstd(const Numbers& x) const {
        double sum = 0;
        for (std::size_t i = 0; i < n; ++i) sum += x[from + i] * x[from + i];
        return 1 / std::sqrt(sum / static_cast<double>(n) + eps);
    }
    double gain(std::size_t i) const { return weight ? (*weight)[i] : 1; }
    void forward(const Numbers& x, Numbers& out) const {
        const double r = rstd(x);
        for (std::size_t i = 0; i < n; ++i) out[to + i] = x[from + i] * r * gain(i);
    }
    void backward(const Numbers& x, const Numbers& dout, Numbers& dx, Numbers* dweight) const {
        const double r = rstd(x);
        double mean = 0;
        for (std::size_t i = 0; i < n; ++i)
            mean += dout[to + i] * gain(i) * x[from + i] * r / static_cast<double>(n);
        for (std::size_t i = 0; i < n; ++i) {
            const double h = x[from + i] * r;
            dx[from + i] += r * (dout[to + i] * gain(i) - h * mean);
            if (dweight) (*dweight)[i] += dout[to + i] * h;
        }
    }
};
template <class F>
void for_each_row_norm(const Use& u, F&& f) {
    const std::size_t C = at(u.features_out());
    for (std::size_t row = 0; row < at(u.rows()); ++row)
        f(Norm{row * C, row * C, C, u.node.numbers[0], u.has(0) ? &u.parameter(0) : nullptr});
}
inline void rms_normalise(const Use& u, const Numbers& x, Numbers& out) {
    for_each_row_norm(u, [&](const Norm& norm) { norm.forward(x, out); });
}
inline void rms_normalise_backward(const Use& u, const Numbers& x, const Numbers& dout, Numbers& dx) {
    for_each_row_norm(
        u, [&](const Norm& norm) { norm.backward(x, dout, dx, u.has(0) ? &u.dparameter(0) : nullptr); });
}
inline void rmsnorm(const Use& u) { rms_normalise(u, u.in(0), u.out(0)); }
inline void rmsnorm_backward(const Use& u) { rms_normalise_backward(u, u.in(0), u.dout(0), u.din(0)); }
inline void add_rmsnorm(const Use& u) {
    add(u);
    rms_normalise(u, u.out(0), u.out(1));
}
inline void add_rmsnorm_backward(const Use& u) {
    Numbers sum(u.out(0).size());
    rms_normalise_backward(u, u.out(0), u.dout(1), sum);
    for (const int i : {0, 1}) add_to(u.din(i), sum);
    add_backward(u);
}

// Calls f(norm, parameter) for the query heads of each row (parameter 0), then for its key heads (1); once
// for all heads together, or for each.
template <class F>
void for_each_head_norm(const Use& u, F&& f) {
    const std::int64_t H = u.node.sizes[0], K = u.node.sizes[1], D = u.part.value(u.node.in[0]).shape.last();
    const bool over_all = u.node.sizes[2] != 0;
    for (std::int64_t row = 0; row < u.rows(); ++row) {
        for (std::int64_t head = 0; head < H + K; ++head) {
            const int parameter = head < H ? 0 : 1;
            if (over_all && head != 0 && head != H) continue;
            const std::int64_t heads = !over_all ? 1 : parameter == 0 ? H : K;
            f(Norm{at((row * (H + 2 * K) + head) * D), at((row * (H + K) + head) * D), at(heads * D),
                   u.node.numbers[0], u.has(parameter) ? &u.parameter(parameter) : nullptr},
              parameter);
        }
    }
}
inline void head_norm(const Use& u) {
    for_each_head_norm(u, [&](const Norm& norm, int) { norm.forward(u.in(0), u.out(0)); });
}
inline void head_norm_backward(const Use& u) {
    for_each_head_norm(u, [&](const Norm& norm, int parameter) {
        norm.backward(u.in(0), u.dout(0), u.din(0), u.has(parameter) ? &u.dparameter(parameter) : nullptr);
    });
}

// ---- products

inline int matrices(const Use& u) { return static_cast<int>(std::ssize(u.node.parameters)) / 2; }
// Calls f(output, matrix, row) for each output: it is that row of that matrix times the input. The parameters
// are first the matrices, then their biases.
template <class F>
void for_each_output(const Use& u, F&& f) {
    std::int64_t output = 0;
    for (int matrix = 0; matrix < matrices(u); ++matrix) {
        const std::int64_t rows = std::ssize(u.parameter(matrix)) / u.features_in();
        for (std::int64_t row = 0; row < rows; ++row) f(output++, matrix, row);
    }
}
inline void multiply(const Use& u, Numbers& out) {
    const std::int64_t IC = u.features_in(), OC = u.features_out();
    for_each_output(u, [&](std::int64_t o, int matrix, std::int64_t matrix_row) {
        const int bias = matrices(u) + matrix;
        for (std::int64_t row = 0; row < u.rows(); ++row) {
            double sum = u.has(bias) ? u.parameter(bias)[at(matrix_row)] : 0;
            for (std::int64_t i = 0; i < IC; ++i)
                sum += u.in(0)[at(row * IC + i)] * u.parameter(matrix)[at(matrix_row * IC + i)];
            out[at(row * OC + o)] = sum;
        }
    });
}
inline void multiply_backward(const Use& u, const Numbers& dout) {
    const std::int64_t IC = u.features_in(), OC = u.features_out();
    for_each_output(u, [&](std::int64_t o, int matrix, std::int64_t matrix_row) {
        const int bias = matrices(u) + matrix;
        for (std::int64_t row = 0; row < u.rows(); ++row) {
            const double d = dout[at(row * OC + o)];
            if (u.has(bias)) u.dparameter(bias)[at(matrix_row)] += d;
            for (std::int64_t i = 0; i < IC; ++i) {
                u.din(0)[at(row * IC + i)] += d * u.parameter(matrix)[at(matrix_row * IC + i)];
                u.dparameter(matrix)[at(matrix_row * IC + i)] += d * u.in(0)[at(row * IC + i)];
            }
        }
    });
}
inline void product(const Use& u) { multiply(u, u.out(0)); }
inline void product_backward(const Use& u) { multiply_backward(u, u.dout(0)); }

// The tanh inside GELU.
inline double gelu_tanh(double x) {
    return std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x));
}
inline void product_gelu(const Use& u) {
    multiply(u, u.out(1));
    for (std::size_t i = 0; i < u.out(0).size(); ++i)
        u.out(0)[i] = u.out(1)[i] / 2 * (1 + gelu_tanh(u.out(1)[i]));
}
inline void product_gelu_backward(const Use& u) {
    Numbers dpre = u.dout(1);
    for (std::size_t i = 0; i < dpre.size(); ++i) {
        const double x = u.out(1)[i], t = gelu_tanh(x);
        const double slope = std::sqrt(2 / std::numbers::pi) * (1 + 3 * 0.044715 * x * x);
        dpre[i] += u.dout(0)[i] * ((1 + t) / 2 + x / 2 * (1 - t * t) * slope);
    }
    multiply_backward(u, dpre);
}

// ---- other activations

// f(element of a, of b, of the output)
template <class F>
void for_each_gated(const Use& u, F&& f) {
    const std::int64_t width = u.features_out();
    for (std::int64_t i = 0; i < u.rows() * width; ++i) {
        const std::int64_t a = i / width * 2 * width + i % width;
        f(at(a), at(a + width), at(i));
    }
}
inline double logistic(double x) { return 1 / (1 + std::exp(-x)); }
inline void swiglu(const Use& u) {
    const Numbers& x = u.in(0);
    for_each_gated(u, [&](std::size_t a, std::size_t b, std::size_t out) {
        u.out(0)[out] = x[a] * logistic(x[a]) * x[b];
    });
}
inline void swiglu_backward(const Use& u) {
    const Numbers& x = u.in(0);
    for_each_gated(u, [&](std::size_t a, std::size_t b, std::size_t out) {
        const double s = logistic(x[a]), d = u.dout(0)[out];
        u.din(0)[a] += d * x[b] * (s + x[a] * s * (1 - s));
        u.din(0)[b] += d * x[a] * s;
    });
}
inline void relu_squared(const Use& u) {
    for (std::size_t i = 0; i < u.out(0).size(); ++i) u.out(0)[i] = std::pow(std::max(u.in(0)[i], 0.0), 2);
}
inline void relu_squared_backward(const Use& u) {
    for (std::size_t i = 0; i < u.out(0).size(); ++i)
        u.din(0)[i] += 2 * std::max(u.in(0)[i], 0.0) * u.dout(0)[i];
}

// ---- rotary positions

// Rotates the pairs of the first H+K heads, and copies the others to `to` as they are.
inline void rotate(const Use& u, const Numbers& from, Numbers& to, bool inverse) {
    const std::int64_t heads = u.node.sizes[0] + u.node.sizes[1], D = u.node.angles->head_size;
    const std::vector<double> frequencies = rope_frequencies(*u.node.angles);
    to = from;
    for (std::int64_t row = 0; row < u.rows(); ++row) {
        for (std::int64_t pair = 0; pair < heads * D / 2; ++pair) {
            const std::size_t a = at(row * u.features_in() + pair / (D / 2) * D + pair % (D / 2));
            const std::size_t b = a + at(D / 2);
            const double angle = static_cast<double>(row % u.part.tokens) * frequencies[at(pair % (D / 2))],
                         sign = inverse ? -1 : 1;
            to[a] = from[a] * std::cos(angle) - sign * from[b] * std::sin(angle);
            to[b] = from[b] * std::cos(angle) + sign * from[a] * std::sin(angle);
        }
    }
}
inline void rope(const Use& u) { rotate(u, u.in(0), u.out(0), u.node.sizes[2] != 0); }
inline void rope_backward(const Use& u) {
    Numbers d;
    rotate(u, u.dout(0), d, u.node.sizes[2] == 0);
    add_to(u.din(0), d);
}

// ---- attention

// A row of attention and one of its heads. Queries and keys lie in the first input, values in the last.
struct Query {
    std::int64_t row, first;             // the row, and the first one that it sees
    std::int64_t query, key, value;      // the first element of the head in rows
    std::int64_t width, value_width, D;  // elements of rows, and of the head
    std::int64_t out;                    // the first element of the head in the output

    std::size_t q(std::int64_t i) const { return at(row * width + query + i); }
    std::size_t k(std::int64_t j, std::int64_t i) const { return at(j * width + key + i); }
    std::size_t v(std::int64_t j, std::int64_t i) const { return at(j * value_width + value + i); }
};

// Calls f(query, its weights of the rows from query.first on) for each row and head.
template <class F>
void for_each_query(const Use& u, F&& f) {
    const std::int64_t H = u.node.sizes[0], K = u.node.sizes[1], window = u.node.sizes[2], T = u.part.tokens;
    const std::int64_t D = u.features_out() / H;
    const Numbers& x = u.in(0);
    for (std::int64_t row = 0; row < u.rows(); ++row) {
        for (std::int64_t head = 0; head < H; ++head) {
            const std::int64_t key_head = head * K / H;
            Query of{.row = row,
                     .first = row / T * T,
                     .query = head * D,
                     .key = (H + key_head) * D,
                     .value = (H + K + key_head) * D,
                     .width = u.features_in(),
                     .value_width = (H + 2 * K) * D,
                     .D = D,
                     .out = (row * H + head) * D};
            if (window > 0) of.first = std::max(of.first, row - window + 1);
            Numbers p;
            double sum = 0;
            for (std::int64_t j = of.first; j <= row; ++j) {
                double s = 0;
                for (std::int64_t i = 0; i < D; ++i) s += x[of.q(i)] * x[of.k(j, i)];
                p.push_back(s / std::sqrt(static_cast<double>(D)));
            }
            // The largest is subtracted, so that no exponential overflows.
            const double most = *std::ranges::max_element(p);
            for (double& a : p) sum += a = std::exp(a - most);
            for (double& a : p) a /= sum;
            f(of, p);
        }
    }
}
inline int values_of(const Use& u) { return static_cast<int>(std::ssize(u.node.in)) - 1; }
inline void attention(const Use& u) {
    std::ranges::fill(u.out(0), 0.0);
    for_each_query(u, [&](const Query& of, const Numbers& p) {
        for (std::int64_t j = of.first; j <= of.row; ++j) {
            for (std::int64_t i = 0; i < of.D; ++i)
                u.out(0)[at(of.out + i)] += p[at(j - of.first)] * u.in(values_of(u))[of.v(j, i)];
        }
    });
}
inline void attention_backward(const Use& u) {
    for_each_query(u, [&](const Query& of, const Numbers& p) {
        const Numbers &x = u.in(0), &v = u.in(values_of(u)), &dout = u.dout(0);
        Numbers &dx = u.din(0), &dv = u.din(values_of(u));
        Numbers dp(p.size());
        double mean = 0;
        for (std::int64_t j = of.first; j <= of.row; ++j) {
            for (std::int64_t i = 0; i < of.D; ++i) {
                dp[at(j - of.first)] += dout[at(of.out + i)] * v[of.v(j, i)];
                dv[of.v(j, i)] += p[at(j - of.first)] * dout[at(of.out + i)];
            }
            mean += p[at(j - of.first)] * dp[at(j - of.first)];
        }
        for (std::int64_t j = of.first; j <= of.row; ++j) {
            const double ds =
                p[at(j - of.first)] * (dp[at(j - of.first)] - mean) / std::sqrt(static_cast<double>(of.D));
            for (std::int64_t i = 0; i < of.D; ++i) {
                dx[of.q(i)] += ds * x[of.k(j, i)];
                dx[of.k(j, i)] += ds * x[of.q(i)];
            }
        }
    });
}

// ---- exchanges between ranks: the identity for one rank

inline void same(const Use& u) { u.out(0) = u.in(0); }
inline void same_backward(const Use& u) { add_to(u.din(0), u.dout(0)); }

// ---- the losses

// A row of capped logits: its softmax, ln of the sum of the exponentials, the loss, and the cap's slopes.
struct Softmax {
    std::int64_t row;
    Numbers p, slopes;
    double lse = 0, loss = 0;
};
// Calls f(softmax) for each row whose target is not ignored.
template <class F>
void for_each_softmax(const Use& u, F&& f) {
    const std::int64_t C = u.features_in(), V = u.node.sizes[0];
    const double cap = u.node.numbers[0];
    for (std::int64_t row = 0; row < u.rows(); ++row) {
        if (u.targets[at(row)] == ignored_target) continue;
        Softmax of{.row = row, .p = Numbers(at(V)), .slopes = Numbers(at(V), 1)};
        Numbers logits(at(V));
        double sum = 0;
        for (std::int64_t v = 0; v < V; ++v) {
            double& logit = logits[at(v)];
            for (std::int64_t c = 0; c < C; ++c)
                logit += u.in(0)[at(row * C + c)] * u.parameter(0)[at(v * C + c)];
            if (cap > 0) {
                of.slopes[at(v)] = 1 - std::pow(std::tanh(logit / cap), 2);
                logit = cap * std::tanh(logit / cap);
            }
            sum += of.p[at(v)] = std::exp(logit);
        }
        for (double& x : of.p) x /= sum;
        of.lse = std::log(sum);
        of.loss = of.lse - logits[at(u.targets[at(row)])];
        f(of);
    }
}
inline void head_loss(const Use& u) {
    std::ranges::fill(u.out(0), 0.0);
    for_each_softmax(u, [&](const Softmax& of) { u.out(0)[at(of.row)] = of.loss; });
}
inline void head_loss_with_z(const Use& u) {
    head_loss(u);
    for_each_softmax(u,
                     [&](const Softmax& of) { u.out(0)[at(of.row)] += u.node.numbers[1] * of.lse * of.lse; });
}
inline void head_loss_backward(const Use& u) {
    const std::int64_t C = u.features_in();
    const double z = u.node.numbers[1];
    for_each_softmax(u, [&](const Softmax& of) {
        for (std::int64_t v = 0; v < std::ssize(of.p); ++v) {
            const double d = (of.p[at(v)] * (1 + 2 * z * of.lse) - (v == u.targets[at(of.row)] ? 1 : 0)) *
                             of.slopes[at(v)] * u.dout(0)[at(of.row)];
            for (std::int64_t c = 0; c < C; ++c) {
                u.din(0)[at(of.row * C + c)] += d * u.parameter(0)[at(v * C + c)];
                u.dparameter(0)[at(v * C + c)] += d * u.in(0)[at(of.row * C + c)];
            }
        }
    });
}

struct Meaning {
    void (*forward)(const Use& use);
    void (*backward)(const Use& use);  // adds to the gradients of inputs and parameters
    // The function whose slopes they are, if `forward` leaves a term out.
    void (*differentiated)(const Use& use) = forward;
};
inline const std::map<std::string_view, Meaning>& meanings() {
    static const std::map<std::string_view, Meaning> table = {
        {"embedding", {embedding, embedding_backward}},
        {"layernorm", {layernorm, layernorm_backward}},
        {"add_layernorm", {add_layernorm, add_layernorm_backward}},
        {"product", {product, product_backward}},
        {"product_gelu", {product_gelu, product_gelu_backward}},
        {"attention", {attention, attention_backward}},
        {"add", {add, add_backward}},
        {"gather", {same, same_backward}},
        {"scatter", {same, same_backward}},
        {"rmsnorm", {rmsnorm, rmsnorm_backward}},
        {"add_rmsnorm", {add_rmsnorm, add_rmsnorm_backward}},
        {"head_norm", {head_norm, head_norm_backward}},
        {"swiglu", {swiglu, swiglu_backward}},
        {"relu_squared", {relu_squared, relu_squared_backward}},
        {"rope", {rope, rope_backward}},
        {"head_loss", {head_loss, head_loss_backward, head_loss_with_z}}};
    return table;
}

}  // namespace llmc::interpreter
