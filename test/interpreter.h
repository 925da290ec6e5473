// An interpreter of a model's trace in fp64. It computes the loss and the gradients of all parameters by the
// formulas of llmc/device/ops.h, one operation at a time. It is a second, independent implementation: it
// knows no lists, no memory and no ranks.
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

// ---- products

inline void multiply(const Use& u, Numbers& out) {
    const std::int64_t IC = u.features_in(), OC = u.features_out();
    for (std::int64_t row = 0; row < u.rows(); ++row) {
        for (std::int64_t o = 0; o < OC; ++o) {
            double sum = u.has(1) ? u.parameter(1)[at(o)] : 0;
            for (std::int64_t i = 0; i < IC; ++i)
                sum += u.in(0)[at(row * IC + i)] * u.parameter(0)[at(o * IC + i)];
            out[at(row * OC + o)] = sum;
        }
    }
}
inline void multiply_backward(const Use& u, const Numbers& dout) {
    const std::int64_t IC = u.features_in(), OC = u.features_out();
    for (std::int64_t row = 0; row < u.rows(); ++row) {
        for (std::int64_t o = 0; o < OC; ++o) {
            const double d = dout[at(row * OC + o)];
            if (u.has(1)) u.dparameter(1)[at(o)] += d;
            for (std::int64_t i = 0; i < IC; ++i) {
                u.din(0)[at(row * IC + i)] += d * u.parameter(0)[at(o * IC + i)];
                u.dparameter(0)[at(o * IC + i)] += d * u.in(0)[at(row * IC + i)];
            }
        }
    }
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

// ---- attention

// Calls f for each row and head: f(function that gives an element's index in qkv, row, first row of its
// sequence, the row's weights, first element of the output, HS).
template <class F>
void for_each_query(const Use& u, F&& f) {
    const Shape& qkv = u.part.value(u.node.in[0]).shape;  // (T,3,NH,HS)
    const std::int64_t T = qkv[0], NH = qkv[2], HS = qkv[3], C = NH * HS;
    for (std::int64_t row = 0; row < u.rows(); ++row) {
        for (std::int64_t head = 0; head < NH; ++head) {
            const auto element = [=](std::int64_t of, int which, std::int64_t i) {
                return at((of * 3 + which) * C + head * HS + i);
            };
            const std::int64_t first = row / T * T;
            Numbers p;
            double sum = 0;
            for (std::int64_t j = first; j <= row; ++j) {
                double s = 0;
                for (std::int64_t i = 0; i < HS; ++i)
                    s += u.in(0)[element(row, 0, i)] * u.in(0)[element(j, 1, i)];
                p.push_back(s / std::sqrt(static_cast<double>(HS)));
            }
            // The largest is subtracted, so that no exponential overflows.
            const double most = *std::ranges::max_element(p);
            for (double& x : p) sum += x = std::exp(x - most);
            for (double& x : p) x /= sum;
            f(element, row, first, p, row * C + head * HS, HS);
        }
    }
}
inline void attention(const Use& u) {
    std::ranges::fill(u.out(0), 0.0);
    for_each_query(u, [&](const auto& element, std::int64_t row, std::int64_t first, const Numbers& p,
                          std::int64_t out, std::int64_t HS) {
        for (std::int64_t j = first; j <= row; ++j) {
            for (std::int64_t i = 0; i < HS; ++i)
                u.out(0)[at(out + i)] += p[at(j - first)] * u.in(0)[element(j, 2, i)];
        }
    });
}
inline void attention_backward(const Use& u) {
    for_each_query(u, [&](const auto& element, std::int64_t row, std::int64_t first, const Numbers& p,
                          std::int64_t out, std::int64_t HS) {
        const Numbers &x = u.in(0), &dout = u.dout(0);
        Numbers& dx = u.din(0);
        Numbers dp(p.size());
        double mean = 0;
        for (std::int64_t j = first; j <= row; ++j) {
            for (std::int64_t i = 0; i < HS; ++i) {
                dp[at(j - first)] += dout[at(out + i)] * x[element(j, 2, i)];
                dx[element(j, 2, i)] += p[at(j - first)] * dout[at(out + i)];
            }
            mean += p[at(j - first)] * dp[at(j - first)];
        }
        for (std::int64_t j = first; j <= row; ++j) {
            const double ds =
                p[at(j - first)] * (dp[at(j - first)] - mean) / std::sqrt(static_cast<double>(HS));
            for (std::int64_t i = 0; i < HS; ++i) {
                dx[element(row, 0, i)] += ds * x[element(j, 1, i)];
                dx[element(j, 1, i)] += ds * x[element(row, 0, i)];
            }
        }
    });
}

// ---- exchanges between ranks: the identity for one rank

inline void same(const Use& u) { u.out(0) = u.in(0); }
inline void same_backward(const Use& u) { add_to(u.din(0), u.dout(0)); }

// ---- the losses

// Calls f(row, the softmax of its logits, its loss) for each row whose target is not ignored.
template <class F>
void for_each_softmax(const Use& u, F&& f) {
    const std::int64_t C = u.features_in(), V = u.node.sizes[0];
    for (std::int64_t row = 0; row < u.rows(); ++row) {
        if (u.targets[at(row)] == ignored_target) continue;
        Numbers logits(at(V)), p(at(V));
        double sum = 0;
        for (std::int64_t v = 0; v < V; ++v) {
            for (std::int64_t c = 0; c < C; ++c)
                logits[at(v)] += u.in(0)[at(row * C + c)] * u.parameter(0)[at(v * C + c)];
            sum += p[at(v)] = std::exp(logits[at(v)]);
        }
        for (double& x : p) x /= sum;
        f(row, p, std::log(sum) - logits[at(u.targets[at(row)])]);
    }
}
inline void head_loss(const Use& u) {
    std::ranges::fill(u.out(0), 0.0);
    for_each_softmax(u, [&](std::int64_t row, const Numbers&, double loss) { u.out(0)[at(row)] = loss; });
}
inline void head_loss_backward(const Use& u) {
    const std::int64_t C = u.features_in();
    for_each_softmax(u, [&](std::int64_t row, const Numbers& p, double) {
        for (std::int64_t v = 0; v < std::ssize(p); ++v) {
            const double d = (p[at(v)] - (v == u.targets[at(row)] ? 1 : 0)) * u.dout(0)[at(row)];
            for (std::int64_t c = 0; c < C; ++c) {
                u.din(0)[at(row * C + c)] += d * u.parameter(0)[at(v * C + c)];
                u.dparameter(0)[at(v * C + c)] += d * u.in(0)[at(row * C + c)];
            }
        }
    });
}

struct Meaning {
    void (*forward)(const Use& use);
    void (*backward)(const Use& use);  // adds to the gradients of inputs and parameters
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

        {"head_loss", {head_loss, head_loss_backward}}};
    return table;
}

// ---- a whole model

struct Result {
    double loss = 0;  // the sum over all tokens, without the scale
    Parameters gradients;
};

// The result for `scale` times the sum of the losses of all tokens.
inline Result interpret(const Model& model, Parameters parameters, std::span<const std::int32_t> tokens,
                        std::span<const std::int32_t> targets, double scale) {
    const Outline outline = outline_of(model);
    const std::int64_t sequences = std::ssize(tokens) / model.sequence_length;
    Result result;
    for (const auto& [name, values] : parameters) result.gradients[name].resize(values.size());
    const std::size_t count = outline.parts.size();
    std::vector<std::vector<Numbers>> values(count), gradients(count);
    // Visits the part's nodes in one direction.
    const auto visit = [&](std::size_t number, const auto& f) {
        const Part& part = outline.kind_of(static_cast<int>(number)).part;
        std::vector<Numbers*> own, own_gradients;
        for (std::size_t i = 0; i < part.parameters.size(); ++i) {
            const std::string name = outline.unit(outline.parts[number].parameter_units[i]).spec.name + "." +
                                     part.parameters[i].spec.name;
            own.push_back(&parameters.at(name));
            own_gradients.push_back(&result.gradients.at(name));
        }
        f(part, [&](const Node& node, auto pass) {
            (meanings().at(node.operation->name).*pass)({part, node, sequences, tokens, targets,
                                                         values[number], gradients[number], own,
                                                         own_gradients});
        });
    };
    for (std::size_t number = 0; number < count; ++number) {
        visit(number, [&](const Part& part, const auto& run) {
            for (const Value& value : part.values)
                values[number].emplace_back(at(sequences * value.shape.elements()));
            gradients[number] = values[number];
            if (part.input >= 0)
                values[number][at(part.input)] =
                    values[number - 1][at(outline.kind_of(static_cast<int>(number) - 1).part.output)];
            for (const Node& node : part.nodes) run(node, &Meaning::forward);
        });
    }
    const Node& head = outline.kinds[at(outline.parts.back().kind)].part.nodes.back();
    for (const double loss : values.back()[at(head.out[0])]) result.loss += loss;
    std::ranges::fill(gradients.back()[at(head.out[0])], scale);
    for (std::size_t number = count; number-- > 0;) {
        visit(number, [&](const Part& part, const auto& run) {
            if (part.output >= 0)
                gradients[number][at(part.output)] =
                    gradients[number + 1][at(outline.kind_of(static_cast<int>(number) + 1).part.input)];
            for (const Node& node : Reversed(part.nodes)) run(node, &Meaning::backward);
        });
    }
    return result;
}

}  // namespace llmc::interpreter
