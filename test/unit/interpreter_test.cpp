// The interpreter of traces: its backward passes against differences of its forward passes, and the program
// against the interpreter.
#include "test/interpreter.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <sstream>

#include "llmc/core/random.h"
#include "llmc/model/operations.h"
#include "test/gpt2_config.h"
#include "test/probe/run_model.h"
#include "test/strange_family.h"

namespace llmc {
namespace {

using interpreter::at;
using interpreter::Numbers;
using interpreter::Parameters;

Numbers normal(const std::string& name, std::int64_t count) {
    const RandomStream random(1, name);
    Numbers x;
    for (std::int64_t i = 0; i < count; ++i) x.push_back(random.normal(static_cast<std::uint64_t>(i)));
    return x;
}

// ---- each operation

constexpr std::int64_t T = 3, C = 6, V = 5, sequences = 2;

ParamSpec table(const char* name, std::int64_t rows) {
    return {.name = name, .shape = {rows, C}, .init = {}, .tensor_dim = 0};
}

// Parts that contain an operation, with and without its optional operands.
struct Case {
    std::string operation;
    void (*trace)(Trace& t);
};
int queries(Trace& t) {
    return product(t, "qkv", gather(t, t.input()), {3, 2, 2}, by_outputs(1, "heads"), false, {});
}
int packed(Trace& t, const HeadCounts& heads, std::int64_t size, bool has_bias) {
    const auto [H, K] = heads;
    return packed_product(t, "qkv", gather(t, t.input()),
                          {{"q", {H, "heads"}}, {"k", {K, "keys", true}}, {"v", {K, "keys", true}}}, {size},
                          has_bias, {});
}
int packed_channels(Trace& t) {
    return packed_product(t, "gate_up", gather(t, t.input()),
                          {{"gate", {3, "channels"}}, {"up", {3, "channels"}}}, {}, false, {});
}
RopeAngles angles(std::int64_t head_size) { return {.positions = T, .head_size = head_size, .theta = 7}; }
// The queries and keys, apart from the values.
int rotated(Trace& t, int qkv, const HeadCounts& heads) {
    const std::int64_t D = t[qkv].shape.last();
    return rope(t, head_norm(t, qkv, heads, {.eps = 0.1}), heads, angles(D));
}
const std::vector<Case> cases = {
    {"embedding", [](Trace& t) { embedding(t, table("wte.weight", V), table("wpe.weight", T)); }},
    {"embedding", [](Trace& t) { embedding(t, table("wte.weight", V), std::nullopt); }},
    {"layernorm", [](Trace& t) { layernorm(t, "n", t.input(), true); }},
    {"layernorm", [](Trace& t) { layernorm(t, "n", t.input(), false); }},
    {"add_layernorm",
     [](Trace& t) { add_layernorm(t, "n", t.input(), layernorm(t, "m", t.input(), true), true); }},
    {"add_layernorm", [](Trace& t) { add_layernorm(t, "n", t.input(), t.input(), false); }},
    {"product",
     [](Trace& t) { product(t, "p", gather(t, t.input()), {4}, by_outputs(0, "outputs"), true, {}); }},
    {"product", [](Trace& t) { queries(t); }},
    {"product_gelu",
     [](Trace& t) { product_gelu(t, "p.a", gather(t, t.input()), {4}, by_outputs(0, "outputs"), true, {}); }},
    {"product_gelu",
     [](Trace& t) {
         product_gelu(t, "p.a", gather(t, t.input()), {4}, by_outputs(0, "outputs"), false, {});
     }},
    {"attention",
     [](Trace& t) {
         attention(t, "a", queries(t), {2, 2});
     }},
    {"add", [](Trace& t) { add(t, t.input(), layernorm(t, "n", t.input(), false)); }},
    {"add", [](Trace& t) { add(t, t.input(), t.input()); }},
    {"gather", [](Trace& t) { gather(t, t.input()); }},
    {"scatter",
     [](Trace& t) {
         scatter(t, product(t, "p", attention(t, "a", queries(t), {2, 2}), {C}, by_inputs(), true, {}));
     }},
    {"rmsnorm", [](Trace& t) { rmsnorm(t, "n", t.input(), true, 0.1); }},
    {"rmsnorm", [](Trace& t) { rmsnorm(t, "n", t.input(), false, 1e-6); }},
    {"add_rmsnorm",
     [](Trace& t) { add_rmsnorm(t, "n", t.input(), rmsnorm(t, "m", t.input(), true, 1e-6), true, 0.1); }},
    {"add_rmsnorm", [](Trace& t) { add_rmsnorm(t, "n", t.input(), t.input(), false, 1e-6); }},
    {"product",
     [](Trace& t) {
         packed(t, {2, 1}, 2, false);
     }},
    {"product",
     [](Trace& t) {
         packed(t, {4, 2}, 1, true);
     }},
    {"swiglu", [](Trace& t) { swiglu(t, "a", packed_channels(t)); }},
    {"relu_squared", [](Trace& t) { relu_squared(t, "a", packed_channels(t)); }},
    // Each head, or all of them; with one weight, with both, or with none.
    {"head_norm",
     [](Trace& t) {
         head_norm(t, packed(t, {4, 2}, 3, false), {4, 2}, {"q", "k", false, 0.1});
     }},
    {"head_norm",
     [](Trace& t) {
         head_norm(t, packed(t, {3, 1}, 2, false), {3, 1}, {.eps = 1e-6});
     }},
    {"head_norm",
     [](Trace& t) {
         head_norm(t, packed(t, {2, 1}, 2, false), {2, 1}, {"", "k", false, 0.1});
     }},
    {"head_norm",
     [](Trace& t) {
         head_norm(t, packed(t, {4, 2}, 2, false), {4, 2}, {"q", "k", true, 0.1});
     }},
    {"head_norm",
     [](Trace& t) {
         head_norm(t, packed(t, {2, 2}, 2, false), {2, 2}, {.over_all = true, .eps = 1e-6});
     }},
    {"rope",
     [](Trace& t) {
         rope(t, packed(t, {2, 1}, 4, false), {2, 1}, angles(4));
     }},
    {"rope",
     [](Trace& t) {
         rope(t, packed(t, {1, 1}, 2, false), {1, 1}, angles(2), true);
     }},
    {"rope",
     [](Trace& t) {
         rotated(t, packed(t, {2, 1}, 4, false), {2, 1});
     }},
    // Several query heads for each key head, or for the only one; a window; queries and keys apart from values.
    {"attention",
     [](Trace& t) {
         attention(t, "a", packed(t, {4, 2}, 2, false), {4, 2});
     }},
    {"attention",
     [](Trace& t) {
         attention(t, "a", packed(t, {3, 1}, 2, false), {3, 1}, 2);
     }},
    {"attention",
     [](Trace& t) {
         attention(t, "a", packed(t, {2, 2}, 1, false), {2, 2}, 1);
     }},
    {"attention",
     [](Trace& t) {
         const int qkv = packed(t, {4, 2}, 2, false);
         attention(t, "a", qkv, {4, 2}, 2, rotated(t, qkv, {4, 2}));
     }},
    {"head_loss", [](Trace& t) { head_loss(t, gather(t, t.input()), table("wte.weight", V), true); }},
    {"head_loss",
     [](Trace& t) { head_loss(t, gather(t, t.input()), table("wte.weight", V), true, {.cap = 2}); }},
    {"head_loss", [](Trace& t) {
         head_loss(t, gather(t, t.input()), table("wte.weight", V), true, {.cap = 3, .z_loss = 0.25F});
     }}};

// The last node of a part, with random numbers as its operands.
struct OneNode {
    explicit OneNode(const Case& of) {
        Trace t("part", "unit", T, of.operation == "embedding" ? 0 : C);
        of.trace(t);
        part = t.finish();
        for (std::size_t i = 0; i < part.values.size(); ++i)
            values.push_back(
                normal("value " + std::to_string(i), sequences * part.values[i].shape.elements()));
        for (const PartParameter& parameter : part.parameters)
            parameters.push_back(normal(parameter.spec.name, parameter.spec.shape.elements()));
        // Statistics have no gradient, losses have one.
        const Node& node = part.nodes.back();
        for (std::size_t i = 0; i < values.size(); ++i) {
            const bool counts = std::ranges::find(node.out, static_cast<int>(i)) != node.out.end() &&
                                (!part.values[i].is_fp32 || of.operation == "head_loss");
            gradients.push_back(counts ? normal("gradient " + std::to_string(i), std::ssize(values[i]))
                                       : Numbers(values[i].size()));
        }
        for (const Numbers& parameter : parameters) parameter_gradients.emplace_back(parameter.size());
    }

    void run(void (*interpreter::Meaning::*pass)(const interpreter::Use&)) {
        std::vector<Numbers*> of_part, gradients_of_part;
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            of_part.push_back(&parameters[i]);
            gradients_of_part.push_back(&parameter_gradients[i]);
        }
        const Node& node = part.nodes.back();
        (interpreter::meanings().at(node.operation->name).*
         pass)({part, node, sequences, tokens, targets, values, gradients, of_part, gradients_of_part});
    }
    // The sum of the outputs, each times its gradient: the function that is differentiated. Also the sum of
    // their absolute values.
    std::pair<double, double> sum() {
        run(&interpreter::Meaning::differentiated);
        std::pair<double, double> sums;
        for (const int out : part.nodes.back().out) {
            for (std::size_t i = 0; i < values[at(out)].size(); ++i) {
                const double term = values[at(out)][i] * gradients[at(out)][i];
                sums.first += term;
                sums.second += std::abs(term);
            }
        }
        return sums;
    }

    Part part;
    std::vector<std::int32_t> tokens = {3, 0, 3, 1, 4, 3}, targets = {1, ignored_target, 4, 4, 0, 2};
    std::vector<Numbers> values, gradients, parameters, parameter_gradients;
};

// The quotient D(h) = (L(x+h) - L(x-h)) / 2h has the error h^2/6 L''' + h^4/120 L''''' + ... The combination
// (4 D(h) - D(2h)) / 3 has only the error h^4/30 L'''''. With h = 1e-3 this is below 1e-9 of the terms of L,
// if L's derivatives are below 3e4 of them. L sums some hundred terms, each of tens of numbers. Its roundings
// are below 1e3 u = 1e-13 of the terms, and 1e-10 after division by h.
void expect_slopes(OneNode& node, Numbers& x, const Numbers& gradient, const std::string& what) {
    for (std::size_t i = 0; i < x.size(); ++i) {
        const double old = x[i], h = 1e-3, terms = node.sum().second;
        const auto difference = [&](double step) {
            x[i] = old + step;
            const double above = node.sum().first;
            x[i] = old - step;
            const double slope = (above - node.sum().first) / (2 * step);
            x[i] = old;
            return slope;
        };
        const double slope = (4 * difference(h) - difference(2 * h)) / 3;
        EXPECT_NEAR(gradient[i], slope, 2e-9 * (1 + terms)) << what << " " << i;
    }
}

TEST(Interpreter, BackwardPassesAreTheSlopesOfForwardPasses) {
    for (const Case& of : cases) {
        OneNode node(of);
        const Node last = node.part.nodes.back();
        SCOPED_TRACE(of.operation);
        ASSERT_EQ(last.operation->name, of.operation);
        node.run(&interpreter::Meaning::forward);
        node.run(&interpreter::Meaning::backward);
        for (const int in : std::set<int>(last.in.begin(), last.in.end()))
            expect_slopes(node, node.values[at(in)], Numbers(node.gradients[at(in)]), "value");
        for (const int parameter : last.parameters) {
            if (parameter >= 0)
                expect_slopes(node, node.parameters[at(parameter)], node.parameter_gradients[at(parameter)],
                              "parameter");
        }
    }
}

// The rows of operations are in the table's file or in a family's.
TEST(Interpreter, KnowsAllOperations) {
    std::stringstream text;
    const auto folder = std::filesystem::path(__FILE__).parent_path() / "../../llmc/model";
    for (const auto& file : std::filesystem::directory_iterator(folder)) {
        if (file.path().extension() == ".cpp") text << std::ifstream(file.path()).rdbuf();
    }
    const std::string source = text.str();
    const std::regex row(R"re(const Operation \w+\s*\{\s*\.name = "(\w+)")re");
    std::set<std::string, std::less<>> rows, known, tested;
    for (auto found = std::sregex_iterator(source.begin(), source.end(), row);
         found != std::sregex_iterator(); ++found)
        rows.insert((*found)[1]);
    // Nothing is traced with those of adapters; test_adapters.py compares them with PyTorch.
    std::erase_if(rows, [](const std::string& name) { return name.starts_with("low_rank"); });
    for (const auto& [name, meaning] : interpreter::meanings()) known.emplace(name);
    for (const Case& of : cases) tested.insert(of.operation);
    EXPECT_EQ(known, rows);
    EXPECT_EQ(tested, rows);
}

// ---- the program

// The parameters of all units.
template <class Get>
Parameters by_names(const ParameterStore& store, Get&& flat) {
    Parameters all;
    for (int unit = 0; unit < store.units(); ++unit) {
        const UnitLayout& layout = store.layout(unit);
        for (const UnitLayout::Entry& entry : layout.entries()) {
            const auto values =
                layout.view(flat(store.buffers(unit)), entry.spec.name).template span<float>();
            all[layout.full_name(entry.spec)] =
                Numbers(values.begin(), values.begin() + entry.spec.shape.elements());
        }
    }
    return all;
}

double norm(const Numbers& x) {
    double sum = 0;
    for (const double a : x) sum += a * a;
    return std::sqrt(sum);
}

// Each number of the program is a sum of at most n products. This adds n roundings u = 6e-8 of the sizes of
// its terms to earlier errors. The longest path to a gradient has ten operations a layer forward, and as many
// backward. So the bound is 20 L n u of a gradient's norm, if no operation makes an error grow more than its
// terms. That is 8e-5 here (observed: 1e-6).
void expect_gradients(const Model& model, bool draws_weights) {
    constexpr std::int64_t batch = 4;
    probe::Model program(model, DType::fp32, batch, 2, 0, DType::fp32, make_cpu_device(1));
    for (int unit = 0; draws_weights && unit < program.store().units(); ++unit) {
        const UnitLayout& layout = program.store().layout(unit);
        std::vector<float> flat(at(program.store().elements(unit)));
        for (const UnitLayout::Entry& entry : layout.entries()) {
            const Numbers drawn = normal(layout.full_name(entry.spec), entry.spec.shape.elements());
            for (std::size_t i = 0; i < drawn.size(); ++i)
                flat[at(entry.offset) + i] = static_cast<float>(entry.spec.init.mean + 0.2 * drawn[i]);
        }
        program.store().set_weights(unit, flat);
    }
    const std::int64_t length = model.sequence_length;
    std::vector<std::int32_t> text, tokens, targets;
    for (std::int64_t i = 0; i < batch * (length + 1); ++i)
        text.push_back(static_cast<std::int32_t>((7 * i * i + 3 * i + 1) % model.vocabulary));
    for (std::int64_t i = 0; i < batch * (length + 1); ++i) {
        if (i % (length + 1) < length) tokens.push_back(text[at(i)]);
        if (i % (length + 1) > 0) targets.push_back(text[at(i)]);
    }
    const double loss = program.step(text, false);
    const auto in_all = static_cast<double>(tokens.size());
    const interpreter::Result exact = interpreter::interpret(
        model, by_names(program.store(), [](const UnitBuffers& unit) { return unit.master; }), tokens,
        targets, 1 / in_all);
    constexpr double bound = 20 * 8 * 8 * 6e-8;
    EXPECT_NEAR(loss, exact.loss / in_all, bound * loss);
    for (const auto& [name, made] :
         by_names(program.store(), [](const UnitBuffers& unit) { return unit.updated_gradients; })) {
        const Numbers& expected = exact.gradients.at(name);
        Numbers difference = made;
        for (std::size_t i = 0; i < made.size(); ++i) difference[i] -= expected[i];
        EXPECT_GT(norm(expected), 0) << name;
        EXPECT_LE(norm(difference), bound * norm(expected)) << name;
    }
}

TEST(Interpreter, AgreesWithGpt2) {
    for (const bool bias : {true, false}) {
        for (const bool tied : {true, false})
            expect_gradients(gpt2({.layers = 3,
                                   .heads = 2,
                                   .channels = 10,
                                   .sequence_length = 7,
                                   .vocabulary = 37,
                                   .bias = bias,
                                   .tied_head = tied}),
                             true);
    }
}
Model small(const char* name, std::vector<std::pair<std::string, ModelValue>> changes) {
    const std::initializer_list<std::pair<const char*, std::int64_t>> sizes = {
        {"layers", 3},  {"heads", 4},     {"kv-heads", 2},   {"channels", 12},
        {"seq-len", 7}, {"mlp-size", 10}, {"vocab-size", 37}};
    for (const auto& [option, size] : sizes) changes.insert(changes.begin(), {option, size});
    return model_with(name, changes);
}
TEST(Interpreter, AgreesWithLlama) {
    const ModelValue on = true, head_size = std::int64_t{6}, window = std::int64_t{3};
    const ModelValue behind = std::string("behind");
    for (const char* const qk_norm : {"none", "head", "all"}) {
        const ModelValue kind = std::string(qk_norm);
        SCOPED_TRACE(qk_norm);
        expect_gradients(
            small("llama-tiny", {{"head-size", head_size}, {"window", window}, {"qk-norm", kind}}), true);
        expect_gradients(small("llama-tiny", {{"head-size", head_size},
                                              {"kv-heads", std::int64_t{1}},
                                              {"qk-norm", kind},
                                              {"norms", behind},
                                              {"qkv-bias", on},
                                              {"tied-head", on},
                                              {"z-loss", 0.1}}),
                         true);
    }
}
TEST(Interpreter, AgreesWithNanochat) {
    expect_gradients(
        small("nanochat-tiny", {{"channels", std::int64_t{16}}, {"logit-cap", 2.0}, {"z-loss", 0.1}}), true);
}
TEST(Interpreter, AgreesWhereGradientsShareMemory) {
    expect_gradients(strange::model_of_shared_gradients(), false);
}
TEST(Interpreter, AgreesWithAStrangeFamily) { expect_gradients(strange::model(), false); }

}  // namespace
}  // namespace llmc
