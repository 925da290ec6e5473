// The lists that are derived from a part's trace. Faults planted in a trace or in a list are found before a
// step runs, with a message that names the operation.
#include "llmc/model/part_lists.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <string_view>

#include "llmc/model/draft.h"
#include "llmc/model/operations.h"
#include "test/gpt2_units.h"
#include "test/strange_family.h"
#include "test/unit/programming_fault.h"

namespace llmc {
namespace {

constexpr GPTConfig config{.layers = 2, .heads = 4, .channels = 16, .sequence_length = 8, .vocabulary = 37};
constexpr Init normal{.stddev = 0.02};

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
    const int o = product(t, "c_proj", attention(t, "attn", q, {4, 4}), {16}, by_inputs(), true, normal);
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
    c.call<Copy>({c.output(0), c.read(0)});
    c.call<Add>(
        [](const Running&, const Tensor* t) {
            return Add{t[0], t[0], t[1]};
        },
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

TEST(Trace, AnOperandThatIsUsedOtherwise) {
    const auto no_work = [](const Part&, const Node&) { return Work{}; };
    const Operation row{.name = "half",
                        .forward =
                            [](Calls& c) {
                                const Operand out = c.output(0);
                                c.call<Copy>({c.read(0), out});
                            },
                        .backward = [](Calls& c) { c.pass_gradient(0, 0); },
                        .work = no_work};
    const Part part = with_row(row);
    Scratch scratch;
    expect_fault([&] { derive_lists(part, {}, scratch); },
                 "block {}: half twice passes operand 0 of copy with another access than copy has");
}

// Memory of the row's own, in a part that keeps values for its backward pass.
TEST(Trace, ARowWithMemoryOfItsOwn) {
    const Operation row{.name = "roomy",
                        .forward =
                            [](Calls& c) {
                                c.call("copy", run_op<InOrder<Copy>>,
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
        c.call("copy", run_op<InOrder<Copy>>, {c.output(0), x, x, x, x, x, x, x, x, x, x});
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

}  // namespace
}  // namespace llmc
