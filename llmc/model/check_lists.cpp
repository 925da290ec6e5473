// Follows a part's lists call by call, in the orders in which a step runs them. It stops with an error at the
// first call that reads a value that is missing or overwritten (part_lists.h).
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/model/part_lists.h"

namespace llmc {

namespace {

class Follower {
  public:
    explicit Follower(const PartLists& lists) : lists_(lists) {}

    void run(const List& list, std::string_view pass) {
        for (const ListCall& call : list) {
            for (const ListOperand& operand : call.operands) {
                if (operand.access == Access::read || operand.access == Access::add)
                    read(call, operand, pass);
                // check_model allows tokens in the first part only.
                if (operand.space == Space::tokens && !call.node->operation->takes_tokens)
                    programming_error(
                        fmt::format("{}: {}, {} {} reads tokens, so its row must say .takes_tokens",
                                    lists_.part->name, pass, call.name, call.node->name));
            }
            for (const ListOperand& operand : call.operands) {
                const bool writes = operand.access == Access::write || operand.access == Access::add;
                if (writes && operand.space == Space::output && !has_output_)
                    programming_error(
                        fmt::format("{}: {}, {} {} writes the part's output, which is not there",
                                    lists_.part->name, pass, call.name, call.node->name));
                if (writes && operand.storage >= 0)
                    contents_[place_of(operand)] = {operand.storage, operand.version, operand.is_own_tokens};
            }
        }
    }

    // Forgets a space: other parts and other micro-batches use this memory now.
    void lose(Space space) {
        std::erase_if(contents_, [&](const auto& content) { return content.first.first == space; });
    }
    void lose_output() {
        lose(Space::output);
        has_output_ = false;
    }
    void lose_recomputed(RecomputeKind kind) {
        for (std::size_t i = 0; i < lists_.kept.size(); ++i) {
            if (!lists_.is_kept(i, kind)) contents_.erase({Space::kept, static_cast<int>(i)});
        }
    }
    void require(Space space, std::string_view pass) const {
        if (!contents_.contains({space, 0}))
            programming_error(fmt::format("{}: {} leaves no {}", lists_.part->name, pass,
                                          space == Space::output ? "output" : "gradient of its input"));
    }
    // Adds the contents that come from outside the part.
    void give(const List& list, Space space) {
        for (const ListCall& call : list) {
            for (const ListOperand& operand : call.operands) {
                const bool is_first =
                    operand.space == space && operand.access == Access::read && operand.version == 0;
                if (is_first) contents_.try_emplace(place_of(operand), Content{operand.storage, 0, false});
            }
        }
    }

  private:
    using Place = std::pair<Space, int>;
    struct Content {
        int storage, version;
        bool is_own_tokens;
        bool operator==(const Content&) const = default;
    };

    // The gradients before and after a part share a buffer if both streams have the same width.
    Place place_of(const ListOperand& operand) const {
        const bool is_one = lists_.part->input_width() == lists_.part->output_width();
        const Space space =
            operand.space == Space::output_gradient && is_one ? Space::input_gradient : operand.space;
        const bool has_index =
            space == Space::kept || space == Space::scratch || space == Space::kept_gradient;
        return {space, has_index ? operand.index : 0};
    }

    void read(const ListCall& call, const ListOperand& operand, std::string_view pass) const {
        if (operand.storage < 0) return;
        const auto found = contents_.find(place_of(operand));
        const auto name = [&](int storage) { return lists_.storages[static_cast<std::size_t>(storage)]; };
        const auto refuse = [&](std::string_view why) {
            programming_error(fmt::format("{}: {}, {} {} reads {}, {}", lists_.part->name, pass, call.name,
                                          call.node->name, name(operand.storage), why));
        };
        if (found == contents_.end()) refuse("which nobody made");
        if (found->second == Content{operand.storage, operand.read_version, operand.is_own_tokens}) return;
        refuse(found->second.storage == operand.storage
                   ? "which has changed since"
                   : fmt::format("whose memory holds {} by now", name(found->second.storage)));
    }

    const PartLists& lists_;
    std::map<Place, Content> contents_;
    bool has_output_ = true;
};

}  // namespace

void check_lists(const PartLists& lists) {
    const bool has_input = !lists.part->takes_tokens();
    const auto begin = [&](std::initializer_list<const List*> all) {
        Follower follower(lists);
        for (const List* list : all) {
            follower.give(*list, Space::input);
            follower.give(*list, Space::output_gradient);
        }
        return follower;
    };
    for (const List* rows : {&lists.rows, &lists.rows_of_all}) {
        Follower follower = begin({rows});
        follower.run(*rows, "rows");
        if (!rows->empty() && !lists.part->makes_losses()) follower.require(Space::output, "rows");
    }
    if (lists.part->makes_losses()) {
        begin({&lists.forward}).run(lists.forward, "forward");
        Follower follower = begin({&lists.backward});
        follower.run(lists.backward, "backward");
        if (has_input) follower.require(Space::input_gradient, "backward");
        return;
    }
    const auto forward = [&] {
        Follower follower = begin({&lists.forward});
        follower.run(lists.forward, "forward");
        follower.require(Space::output, "forward");
        follower.lose(Space::scratch);
        follower.lose_output();
        return follower;
    };
    const auto backward = [&](Follower follower, const List& list, const char* pass) {
        follower.give(list, Space::input);
        follower.give(list, Space::output_gradient);
        follower.run(list, pass);
        if (has_input && &list != &lists.backward_weight) follower.require(Space::input_gradient, pass);
        return follower;
    };
    backward(forward(), lists.backward, "backward");
    for (const RecomputeKind kind : {RecomputeKind::selective, RecomputeKind::block}) {
        Follower follower = forward();
        follower.lose_recomputed(kind);
        follower.run(lists.recompute_of(kind), "recompute");
        follower.lose(Space::scratch);
        backward(std::move(follower), lists.backward, "backward");
    }
    if (lists.backward_weight.empty()) return;
    Follower follower = backward(forward(), lists.backward_input, "backward of its input");
    follower.lose(Space::scratch);
    follower.lose(Space::input_gradient);
    follower.lose(Space::output_gradient);
    follower.run(lists.backward_weight, "backward of its weights");
}

}  // namespace llmc
