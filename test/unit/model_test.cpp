// Descriptions of models that do not fit together are refused before anything is allocated, with a message that
// names the part or the operation. Parts that share units agree about them.
#include "llmc/model/model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string_view>

#include "llmc/core/error.h"
#include "llmc/model/operations.h"
#include "llmc/model/part_lists.h"
#include "llmc/parallel/mesh.h"
#include "test/gpt2_units.h"
#include "test/unit/programming_fault.h"

namespace llmc {
namespace {

constexpr GPTConfig config{.layers = 2, .heads = 4, .channels = 16, .sequence_length = 8, .vocabulary = 37};
constexpr Init normal{.stddev = 0.02};

// GPT-2 with other parts. Without the check of the whole model, each of these would end in a step, or train
// something else.
Model with_layer(const std::function<int(Trace&)>& trace, std::int64_t tokens = config.sequence_length,
                 const char* unit = "h.{}") {
    Model model = gpt2(config);
    Trace t("block {}", unit, tokens, config.channels);
    const int output = trace(t);
    model.runs[1].parts[0] = t.finish(output);
    return model;
}

Model with_head(const std::function<void(Trace&, int, const ParamSpec&)>& trace) {
    Model model = gpt2(config);
    Trace t("head", "", config.sequence_length, config.channels);
    ParamSpec table = model.runs[0].parts[0].parameters[0].spec;
    table.name = "lm_head.weight";
    trace(t, gather(t, layernorm(t, "ln_f", t.input(), true)), table);
    model.runs.back().parts[0] = t.finish();
    return model;
}

void expect_refused(const Model& model, std::string_view what) {
    expect_fault([&] { outline_of(model); }, what);
}

int plain_layer(Trace& t) { return add(t, t.input(), layernorm(t, "ln", t.input(), true)); }

TEST(Model, ALayerThatDoesNotFit) {
    EXPECT_EQ(fault_of([] { outline_of(with_layer(plain_layer)); }), "no fault");
    expect_refused(with_layer(plain_layer, config.sequence_length / 2),
                   "block {}: is traced for 4 tokens, but a sequence has 8");
    expect_refused(with_layer([](Trace& t) { return t.input(); }), "block {}: has no operation");
    ParamSpec table = gpt2(config).runs[0].parts[0].parameters[0].spec;
    table.name = "values.weight";
    expect_refused(with_layer([&](Trace& t) {
                       return add(t, t.input(), scatter(t, embedding(t, table, std::nullopt)));
                   }),
                   "values.weight reads tokens, which only the first part has");
    expect_refused(with_layer([&](Trace& t) {
                       head_loss(t, gather(t, layernorm(t, "ln", t.input(), true)), table, false);
                       return t.input();
                   }),
                   "lm_head makes losses, which only the last part can");
}

TEST(Model, ALayerThatIgnoresItsInput) {
    // A family in which the tokens are read again could do this; there is no other source of values.
    Model model = gpt2(config);
    Trace t("head", "", config.sequence_length, config.channels);
    const ParamSpec rows = model.runs[0].parts[0].parameters[0].spec;
    ParamSpec table = rows, read = rows;
    table.name = "lm_head.weight", read.name = "values.weight";
    head_loss(t, gather(t, scatter(t, embedding(t, read, std::nullopt))), table, false);
    const Part part = t.finish();
    Scratch scratch;
    expect_fault([&] { derive_lists(part, {}, scratch); }, "head: no operation reads the part's input");
}

TEST(Model, AHeadThatDoesNotFit) {
    EXPECT_EQ(fault_of([] {
                  outline_of(with_head(
                      [](Trace& t, int x, const ParamSpec& table) { head_loss(t, x, table, false); }));
              }),
              "no fault");
    expect_refused(with_head([](Trace& t, int x, ParamSpec table) {
                       head_loss(t, x, table, false);
                       table.name = "second.weight";
                       head_loss(t, x, table, false);
                   }),
                   "head: makes losses twice");
    const auto with_table = [](const std::function<void(ParamSpec&)>& change) {
        return with_head([&](Trace& t, int x, ParamSpec table) {
            change(table);
            head_loss(t, x, table, false);
        });
    };
    expect_refused(with_table([](ParamSpec& table) {
                       table.shape = {config.vocabulary + 1, config.channels};
                   }),
                   "head: lm_head: the table weight has 38 rows, but the vocabulary has 37");
    const std::string_view divided =
        "head: lm_head: tensor-parallel ranks divide the rows of the table weight";
    expect_refused(with_table([](ParamSpec& table) { table.tensor_dim.reset(); }), divided);
    expect_refused(with_table([](ParamSpec& table) { table.row_multiple = 1; }), divided);
}

TEST(Model, PositionsThatDoNotFit) {
    for (const bool is_short : {false, true}) {
        Model model = gpt2(config);
        ParamSpec& positions = model.runs[0].parts[0].parameters[1].spec;
        if (is_short) {
            positions.shape = {config.sequence_length - 1, config.channels};
        } else {
            positions.tensor_dim = 0;
        }
        expect_refused(
            model,
            "embedding: wte.weight: the table of positions weight needs 8 rows or more, which each "
            "tensor-parallel rank has whole");
    }
}

TEST(Model, PartsAtAnotherPlace) {
    const Model model = gpt2(config);
    Model two_heads = model, no_head = model, no_embedding = model, many_heads = model;
    two_heads.runs.push_back(model.runs.back());
    expect_refused(two_heads, "head: lm_head makes losses, which only the last part can");
    no_head.runs.pop_back();
    expect_refused(no_head, "block {}: the first and the last part come once");
    no_head.runs.back().count = 1;
    expect_refused(no_head, "block {}: the last part makes no losses");
    no_embedding.runs.erase(no_embedding.runs.begin());
    no_embedding.runs.front().count = 1;
    expect_refused(no_embedding, "block {}: the first part has no input but the tokens");
    Model one_part = model;
    one_part.runs.resize(1);
    expect_refused(one_part, "embedding: a model has at least two parts; make the head a part of its own");
    many_heads.runs.back().count = 2;
    expect_refused(many_heads, "head: the first and the last part come once");
}

TEST(Model, ATieToAParameterOfALayer) {
    expect_refused(with_layer([](Trace& t) {
                       const int up = product(t, "up", gather(t, t.input()), {8}, by_outputs(0, "channels"),
                                              false, normal, "h.0.down.weight");
                       return add(
                           t, t.input(),
                           scatter(t, product(t, "down", up, {config.channels}, by_inputs(), true, normal)));
                   }),
                   "is the name of two tensors; a parameter of a layer cannot be tied");
}

TEST(Model, ATieIntoAUnitOfALayer) {
    const auto tied_layer = [](const char* unit, const char* tied) {
        return with_layer(
            [&](Trace& t) {
                const int up = product(t, "up", gather(t, t.input()), {8}, by_outputs(0, "channels"), false,
                                       normal, tied);
                return add(t, t.input(),
                           scatter(t, product(t, "down", up, {config.channels}, by_inputs(), true, normal)));
            },
            config.sequence_length, unit);
    };
    EXPECT_EQ(fault_of([&] { outline_of(tied_layer("h.{}", "shared.weight")); }), "no fault");
    // A unit without a dot in its name is found by a tie.
    expect_refused(tied_layer("h{}", "h1.down.weight"),
                   "is in the unit of a layer; a parameter of a layer cannot be tied");
    expect_fault([&] { tied_layer("h.{}", "h.{}.up.weight"); },
                 "block {}: h.{}.up.weight is not the whole name of one tensor, such as shared.weight");
    expect_fault([&] { tied_layer("h.{}", "shared"); },
                 "block {}: shared is not the whole name of one tensor");
}

TEST(Model, AnEmbeddingIsNoLayer) {
    Model model = gpt2(config);
    model.runs.front().is_layer = true;
    expect_refused(model, "embedding: a layer takes the residual stream, which the first part makes");
}

// The head's norm is in the unit of the first of two parts of one kind. With sequence parallelism its gradient
// is summed over the ranks, so the second part's unit is summed too: both have the same lists.
TEST(Model, PartsOfOneKindSumTheirUnitsAlike) {
    Model model = gpt2(config);
    const auto part = [](const char* name, const char* unit, const char* norm) {
        Trace t(name, unit, config.sequence_length, config.channels);
        if (unit[0] == '\0') {
            ParamSpec table = gpt2(config).runs[0].parts[0].parameters[0].spec;
            table.name = "lm_head.weight";
            head_loss(t, gather(t, layernorm(t, norm, t.input(), true)), table, false);
            return t.finish();
        }
        const int up = product(t, "up", gather(t, t.input()), {8}, by_outputs(0, "channels"), true, normal);
        return t.finish(add(
            t, t.input(), scatter(t, product(t, "down", up, {config.channels}, by_inputs(), true, normal))));
    };
    model.runs.back().parts[0] = part("head", "", "pre0.ln");
    model.runs.insert(model.runs.begin() + 1, {.parts = {part("pre {}", "pre{}", "")}, .count = 2});
    const Outline outline = outline_of(model);
    for (const char* name : {"pre0", "pre1"}) {
        const auto unit = std::ranges::find_if(
            outline.units, [&](const Outline::OutlinedUnit& one) { return one.spec.name == name; });
        ASSERT_NE(unit, outline.units.end()) << name;
        EXPECT_TRUE(unit->sums_replicated({.ranks = 2, .sequence_parallel = true})) << name;
        EXPECT_FALSE(unit->sums_replicated({.ranks = 2})) << name;
    }
}

// A split whose things have no name is checked all the same.
TEST(Model, TensorParallelRanksShareWhatHasNoName) {
    const Model model = with_layer([](Trace& t) {
        const int up = product(t, "up", gather(t, t.input()), {9}, by_outputs(0, ""), false, normal);
        return add(t, t.input(),
                   scatter(t, product(t, "down", up, {config.channels}, by_inputs(), true, normal)));
    });
    try {
        check_mesh_sizes({.tensor = 2}, model);
        ADD_FAILURE() << "no refusal";
    } catch (const UserError& refusal) {
        EXPECT_EQ(std::string_view(refusal.what()),
                  "--tensor-parallel 2 does not divide the 9 parts of up; try 1, 3, 9");
    }
}

TEST(Model, AnOperationThatReadsTokensSaysSo) {
    Model model = gpt2(config);
    Part& part = model.runs.front().parts.front();
    Operation row = *part.nodes.front().operation;
    row.takes_tokens = false;
    part.nodes.front().operation = &row;
    Scratch scratch;
    const PartLists lists = derive_lists(part, {}, scratch);
    expect_fault(
        [&] { check_lists(lists); },
        "embedding: rows, encoder_forward wte.weight reads tokens, so its row must say .takes_tokens");
}

TEST(Trace, ShapesThatAnOperationDoesNotTake) {
    const auto attends = [](const Shape& qkv, int heads_at) {
        return [=] {
            with_layer([&](Trace& t) {
                const int packed = product(t, "qkv", gather(t, layernorm(t, "ln", t.input(), true)), qkv,
                                           by_outputs(heads_at, "heads"), true, normal);
                return attention(t, "attn", packed, {2, 2});
            });
        };
    };
    const char* const attention_needs =
        "block {}: attention attn needs 6 heads for each token, but qkv has the shape";
    expect_fault(attends({3, 8}, 1), attention_needs);
    expect_fault(attends({2, 2, 4}, 1), attention_needs);
    const auto embeds = [](const Shape& table, const Shape& positions) {
        return [=] {
            Trace t("embedding", "", config.sequence_length);
            embedding(t, ParamSpec{.name = "wte.weight", .shape = table, .init = normal},
                      ParamSpec{.name = "wpe.weight", .shape = positions, .init = normal});
        };
    };
    expect_fault(embeds({37, 3, 8}, {8, 8}),
                 "embedding: embedding wte.weight needs a table of rows, but wte.weight has the shape");
    expect_fault(embeds({37, 8}, {8, 16}), "embedding: embedding wte.weight adds wpe.weight of shape");
    expect_fault(
        [] {
            with_layer([](Trace& t) {
                const int two =
                    product(t, "two", gather(t, t.input()), {3, 8}, by_outputs(1, "things"), true, normal);
                return layernorm(t, "ln", two, true);
            });
        },
        "block {}: layernorm ln needs a vector for each token, but two has the shape");
}

TEST(Trace, AStreamOfAnotherWidth) {
    Model model = gpt2(config);
    GPTConfig wider = config;
    wider.channels *= 2;
    model.runs[1] = gpt2(wider).runs[1];
    expect_fault([&] { outline_of(model); }, "block 0 takes the stream of the part before");
}

}  // namespace
}  // namespace llmc
