// The lists that are derived from a part's trace. Faults planted in a trace or in a list are found before a
// step runs, with a message that names the operation.
#include "llmc/model/part_lists.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "llmc/core/error.h"
#include "llmc/model/operations.h"
#include "llmc/parallel/mesh_sizes.h"
#include "test/gpt2_units.h"
#include "test/strange_family.h"

namespace llmc {
namespace {

constexpr GPTConfig config{.layers = 2, .heads = 4, .channels = 16, .sequence_length = 8, .vocabulary = 37};
constexpr Init normal{.stddev = 0.02};

std::string fault_of(const std::function<void()>& f) {
    try {
        f();
    } catch (const ProgrammingError& fault) {
        return fault.what();
    }
    return "no fault";
}

void expect_fault(const std::function<void()>& f, std::string_view what) {
    const std::string fault = fault_of(f);
    EXPECT_NE(fault.find(what), std::string::npos) << fault;
}

class Lists : public testing::Test {
  protected:
    PartLists block(bool sequence_parallel = false) {
        Scratch scratch;
        const TensorSplit split{sequence_parallel ? 2 : 1, sequence_parallel};
        return derive_lists(model_.runs[1].parts[0], {.split = split, .batch = 3}, scratch);
    }

    // Plants a fault in a block's lists.
    void expect_found(const std::function<void(PartLists&)>& plant, std::string_view what,
                      bool sequence_parallel = false) {
        PartLists lists = block(sequence_parallel);
        check_lists(lists);
        plant(lists);
        expect_fault([&] { check_lists(lists); }, what);
    }

    const Model model_ = gpt2(config);
};

List::iterator find(List& list, std::string_view call, std::string_view node) {
    const auto found = std::ranges::find_if(
        list, [&](const ListCall& made) { return made.name == call && made.node->name == node; });
    EXPECT_NE(found, list.end()) << call << " " << node;
    return found;
}
void lose(List& list, std::string_view call, std::string_view node) { list.erase(find(list, call, node)); }
// Moves a call to the place after another call.
void move_behind(List& list, std::string_view call, std::string_view node, std::string_view other,
                 std::string_view other_node) {
    const ListCall moved = *find(list, call, node);
    lose(list, call, node);
    list.insert(find(list, other, other_node) + 1, moved);
}

TEST_F(Lists, ATensorThatIsNotKept) {
    expect_found(
        [](PartLists& lists) {
            for (ListOperand& operand : find(lists.forward, "matmul_forward", "mlp.c_fc")->operands) {
                const bool is_kept = operand.space == Space::kept && operand.access == Access::write;
                if (is_kept) operand.space = Space::scratch;
            }
        },
        "matmul_forward mlp.c_proj reads mlp.act, which nobody made");
}

TEST_F(Lists, ATensorThatIsNotRecomputed) {
    expect_found([](PartLists& lists) { lose(lists.recompute_cheap, "gelu_forward", "mlp.c_fc"); },
                 "matmul_backward mlp.c_proj reads mlp.act, which nobody made");
    expect_found([](PartLists& lists) { lose(lists.recompute, "attention_forward", "attn"); },
                 "matmul_forward attn.c_proj reads attn, which nobody made");
}

TEST_F(Lists, ATensorThatAFewRowsLack) {
    expect_found([](PartLists& lists) { lose(lists.rows, "matmul_forward", "attn.c_attn"); },
                 "rows, attention_cached_forward attn reads attn.c_attn, ");
    expect_found([](PartLists& lists) { lose(lists.rows_of_all, "layernorm_forward", "ln_1"); },
                 "rows, matmul_forward attn.c_attn reads ln_1, ");
}

TEST_F(Lists, ATensorThatIsRecomputedTooLate) {
    expect_found(
        [](PartLists& lists) {
            move_behind(lists.recompute, "layernorm_forward", "ln_1", "matmul_forward", "attn.c_attn");
        },
        "matmul_forward attn.c_attn reads ln_1, which nobody made");
}

TEST_F(Lists, AnExchangeThatIsLeftOutOfAList) {
    expect_found([](PartLists& lists) { lose(lists.forward, "all_gather", "ln_2"); },
                 "matmul_forward mlp.c_fc reads ln_2.gathered, ", true);
    expect_found([](PartLists& lists) { lose(lists.backward, "reduce_scatter", "ln_1"); },
                 "layernorm_backward ln_1 reads the gradient of ln_1.gathered, which has changed since",
                 true);
}

TEST_F(Lists, AnAliasThatIsOverwrittenEarly) {
    // The layernorm adds to the gradient that the product after it still reads.
    expect_found(
        [](PartLists& lists) {
            List& list = lists.backward;
            const ListCall product = *find(list, "matmul_backward", "mlp.c_proj");
            const auto gradient =
                std::ranges::find(product.operands, Space::output_gradient, &ListOperand::space);
            ListCall early = *find(list, "layernorm_backward", "ln_2");
            early.operands = {early.operands.front(), *gradient};
            early.operands.front().access = Access::write;
            list.insert(list.begin(), early);
        },
        "matmul_backward mlp.c_proj reads the gradient of mlp.c_proj.scattered.sum, which has changed since");
}

TEST_F(Lists, AGradientThatIsNotKeptForTheSecondPart) {
    expect_found([](PartLists& lists) { lose(lists.backward_input, "copy", "mlp.c_proj"); },
                 "backward of its weights, matmul_backward mlp.c_proj reads");
    // Or the gradient is copied after it has changed.
    expect_found(
        [](PartLists& lists) {
            move_behind(lists.backward_input, "copy", "mlp.c_proj", "layernorm_backward", "ln_2");
        },
        "copy mlp.c_proj reads the gradient of mlp.c_proj.scattered.sum, which has changed since");
}

TEST_F(Lists, ScratchMemoryThatTwoUseAtOnce) {
    expect_found(
        [](PartLists& lists) {
            List& list = lists.backward;
            // attention's output gradient lies where its input's gradient is written
            const int place = find(list, "matmul_backward", "attn.c_proj")->operands.front().index;
            find(list, "attention_backward", "attn")->operands.front().index = place;
            for (ListOperand& operand : find(list, "matmul_backward", "attn.c_attn")->operands) {
                if (operand.space == Space::scratch && operand.access == Access::read) operand.index = place;
            }
            std::swap(*find(list, "matmul_backward", "attn.c_proj"),
                      *find(list, "attention_backward", "attn"));
        },
        "attention_backward attn reads the gradient of attn, ");
}

TEST_F(Lists, APassThatLeavesNothing) {
    expect_found([](PartLists& lists) { lose(lists.forward, "add", "mlp.c_proj"); },
                 "forward leaves no output");
}

// While a part recomputes, its output has no memory, although its last operation runs: that also makes a kept
// value.
TEST(RareLists, AnOutputOfARecompute) {
    Scratch scratch;
    const Model model = strange::model_of_rare_layers();
    PartLists lists = derive_lists(model.runs[1].parts[0], {}, scratch);
    find(lists.recompute, "layernorm_forward", "ln_last")->operands.front().space = Space::output;
    expect_fault([&] { check_lists(lists); },
                 "recompute, layernorm_forward ln_last writes the part's output, which is not there");
}

// Two sums of the same partial sums, each in place.
TEST(RareLists, AnAddendThatIsSummedInPlaceTwice) {
    Scratch scratch;
    const Model model = strange::model_of_rare_layers();
    PartLists lists = derive_lists(model.runs[1].parts[2], {.split = {.ranks = 2}}, scratch);
    check_lists(lists);
    const ListCall copy = *find(lists.forward, "copy", "attn.out");
    lose(lists.forward, "copy", "attn.out");
    for (ListCall& call : lists.forward) {
        for (ListOperand& operand : call.operands) {
            if (operand.storage != copy.operands[0].storage) continue;
            operand.storage = copy.operands[1].storage;
            operand.space = copy.operands[1].space;
            operand.index = copy.operands[1].index;
        }
    }
    expect_fault([&] { check_lists(lists); },
                 "forward, all_reduce attn.out reads attn.out, which has changed since");
}

TEST(RareLists, EachIsDerivedOnEveryMesh) {
    const Model model = strange::model_of_rare_layers();
    for (const TensorSplit split : {TensorSplit{}, TensorSplit{2, false}, TensorSplit{2, true}})
        derive_lists(outline_of(model), {.split = split});  // checks them
}

// ---- faults of a trace

TEST(Trace, AnExchangeThatIsLeftOut) {
    Trace t("block {}", "h.{}", 8, 16);
    const int n = layernorm(t, "ln_1", t.input(), true);
    expect_fault(
        [&] {
            product(t, "c_attn", n, {3, 4, 4}, by_outputs(1, "heads"), true, normal);
        },
        "product c_attn needs an input that is whole, but ln_1 is the residual stream");
    const int q = product(t, "c_attn", gather(t, n), {3, 4, 4}, by_outputs(1, "heads"), true, normal);
    const int o = product(t, "c_proj", attention(t, "attn", q), {16}, by_inputs(), true, normal);
    expect_fault(
        [&] { add_layernorm(t, "ln_2", t.input(), o, true); },
        "add_layernorm ln_2 needs an input that is the residual stream, but c_proj is a partial sum");
    expect_fault([&] { t.finish(o); }, "leaves c_proj as a partial sum");
}

TEST(Trace, AProductByInputsOfAWholeInput) {
    Trace t("block {}", "h.{}", 8, 16);
    const int all = gather(t, layernorm(t, "ln_1", t.input(), true));
    expect_fault([&] { product(t, "c_proj", all, {16}, by_inputs(), true, normal); },
                 "product c_proj needs an input that is divided in dimension 1, but ln_1.gathered is whole");
}

TEST(Trace, AGELUOfPartialSums) {
    Trace t("block {}", "h.{}", 8, 16);
    const int u = product(t, "up", gather(t, t.input()), {8}, by_outputs(0, "channels"), true, normal);
    expect_fault([&] { product_gelu(t, "mlp.down", u, {16}, by_inputs(), true, normal); },
                 "product_gelu mlp.down makes partial sums, but GELU needs complete sums");
}

TEST(Trace, NamesOfValuesAreUnique) {
    Trace t("block {}", "h.{}", 8, 16);
    const int a = add(t, t.input(), t.input()), b = add(t, a, t.input());
    EXPECT_EQ(t[a].name, "input.sum");
    EXPECT_EQ(t[b].name, "input.sum (2)");
}

TEST(Trace, WidthsThatDiffer) {
    Trace t("block {}", "h.{}", 8, 16);
    const int all = gather(t, layernorm(t, "ln_1", t.input(), true));
    const int u = product_gelu(t, "mlp.c_fc", all, {32}, by_outputs(0, "channels"), true, normal);
    const int d = scatter(t, product(t, "mlp.c_proj", u, {24}, by_inputs(), true, normal));
    expect_fault([&] { add(t, t.input(), d); }, "add mlp.c_proj adds two values of different widths");
}

// A faulty row that a family defines: y = x + x, written with two calls.
Part with_row(const Operation& row) {
    Trace t("block {}", "h.{}", 8, 16);
    return t.finish(t.add({.operation = &row, .name = "twice", .in = {t.input()}},
                          {Value{.name = "twice", .shape = t[t.input()].shape}}));
}
template <Access Second>
void two_calls(Calls& c) {
    c.call("copy", run_op<&Ops::copy>, {c.output(0), c.read(0)});
    c.call("add",
           [](const Running& r, const Tensor* operands) { r.ops.add(operands[0], operands[0], operands[1]); },
           {c.output(0, Second), c.read(0)});
}

TEST(Trace, ARowThatLacksSomething) {
    const auto pass = [](Calls& c) { c.pass_gradient(0, 0); };
    const auto no_work = [](const Part&, const Node&) { return Work{}; };
    expect_fault([&] { with_row({.name = "double", .forward = two_calls<Access::write>, .backward = pass}); },
                 "block {}: double twice has no forward, no backward or no work in its row");
    const Operation row{
        .name = "double", .forward = two_calls<Access::write>, .backward = pass, .work = no_work};
    const Part part = with_row(row);
    Scratch scratch;
    expect_fault([&] { derive_lists(part, {}, scratch); }, "double twice writes its output 0 a second time");
    const Operation half{.name = "double",
                         .forward = two_calls<Access::write>,
                         .backward = pass,
                         .recomputed = 0,
                         .work = no_work};
    expect_fault([&] { with_row(half); }, "double twice has only one of recompute and recomputed in its row");
}

// Memory of the row's own, in a part that keeps values for its backward pass.
TEST(Trace, ARowWithMemoryOfItsOwn) {
    const Operation row{.name = "roomy",
                        .forward =
                            [](Calls& c) {
                                c.call("copy", run_op<&Ops::copy>,
                                       {c.output(0), c.read(0), c.local("room", DType::fp32, {4})});
                            },
                        .backward = [](Calls& c) { c.pass_gradient(0, 0); },
                        .work = [](const Part&, const Node&) { return Work{}; }};
    Trace t("block {}", "h.{}", 8, 16);
    const int n = layernorm(t, "ln_1", t.input(), true);
    const Part part = t.finish(t.add({.operation = &row, .name = "roomy", .in = {n}},
                                     {Value{.name = "roomy", .shape = t[n].shape}}));
    Scratch scratch;
    EXPECT_EQ(fault_of([&] { check_lists(derive_lists(part, {}, scratch)); }), "no fault");
}

TEST(Trace, AnOutputThatNothingUses) {
    Trace t("block {}", "h.{}", 8, 16);
    layernorm(t, "ln_1", t.input(), true);
    const Part part = t.finish(layernorm(t, "ln_2", t.input(), true));
    Scratch scratch;
    expect_fault([&] { derive_lists(part, {}, scratch); },
                 "block {}: nothing uses ln_1, which layernorm ln_1 makes");
}

TEST(Trace, ACallOfTooManyOperands) {
    const auto forward = [](Calls& c) {
        const Operand x = c.read(0);
        c.call("copy", run_op<&Ops::copy>, {c.output(0), x, x, x, x, x, x, x, x, x, x});
    };
    const Operation row{.name = "many",
                        .forward = forward,
                        .backward = [](Calls& c) { c.pass_gradient(0, 0); },
                        .work = [](const Part&, const Node&) { return Work{}; }};
    const Part part = with_row(row);
    Scratch scratch;
    expect_fault([&] { derive_lists(part, {}, scratch); }, "copy twice has more than 10 operands");
}

// A head with a table that the embedding also has.
Model tied(const std::function<void(ParamSpec&)>& change, bool is_tied = true) {
    Model model = gpt2(config);
    Trace t("head", "", config.sequence_length, config.channels);
    ParamSpec table = model.runs[0].parts[0].parameters[0].spec;
    table.name = "wte.weight";
    change(table);
    head_loss(t, gather(t, layernorm(t, "ln_f", t.input(), true)), table, is_tied);
    model.runs.back().parts[0] = t.finish();
    return model;
}

TEST(Trace, ATieThatDoesNotFit) {
    const auto expect_refused = [](const std::function<void(ParamSpec&)>& change) {
        expect_fault([&] { outline_of(tied(change)); }, "head: wte.weight is tied to one of another shape");
    };
    EXPECT_EQ(fault_of([] { outline_of(tied([](ParamSpec&) {})); }), "no fault");
    expect_refused([](ParamSpec& table) { table.init.stddev *= 2; });
    // A vector has no weight decay, a table has.
    expect_refused([](ParamSpec& table) { table.is_vector = true; });
    expect_fault([] { outline_of(tied([](ParamSpec&) {}, false)); },
                 "head: wte.weight is another part's, and not tied");
}

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
                return attention(t, "attn",
                                 product(t, "qkv", gather(t, layernorm(t, "ln", t.input(), true)), qkv,
                                         by_outputs(heads_at, "heads"), true, normal));
            });
        };
    };
    const char* const attention_needs =
        "block {}: attention attn needs queries, keys and values of shape (T, 3, heads, head size), but qkv";
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
