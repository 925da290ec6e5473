#include "llmc/data/stories/stories.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>

#include "llmc/core/error.h"
#include "llmc/core/random.h"
#include "llmc/data/stories/story_plots.h"
#include "llmc/data/stories/story_teller.h"

namespace llmc {

void tell_story(Chooser& chooser) {
    static constexpr std::array plots = {lost_and_found, basket, collection,  present, letters, seed,
                                         hide_and_seek,  voyage, night_visit, harvest, rocket};
    StoryTeller teller(chooser);
    plots[teller.choose(plots.size())](teller);
    teller.end_story();
}

class Stories::RandomChooser final : public Chooser {
  public:
    RandomChooser(std::uint64_t seed, std::string& text, std::vector<Mark>& marks)
        : random_(seed, "stories"), text_(text), marks_(marks) {}

    std::size_t choose(std::size_t n) override {
        nats_ += std::log(static_cast<double>(n));
        marks_.push_back({text_.size(), nats_});
        return random_.below(choices_++, n);
    }
    void write(std::string_view text) override { text_ += text; }

  private:
    RandomStream random_;
    std::uint64_t choices_ = 0;
    double nats_ = 0;
    std::string& text_;
    std::vector<Mark>& marks_;
};

Stories::Stories(std::uint64_t seed, std::size_t bytes) {
    RandomChooser chooser(seed, text_, marks_);
    while (text_.size() < bytes) tell_story(chooser);
    text_.resize(bytes);
}

double Stories::nats_before(std::size_t byte) const {
    const auto later = std::ranges::lower_bound(marks_, byte, {}, &Mark::byte);
    return later == marks_.begin() ? 0 : std::prev(later)->nats;
}

double Stories::entropy(std::size_t begin, std::size_t end) const {
    check(begin < end && end <= text_.size(), "a range of the text");
    return (nats_before(end) - nats_before(begin)) / static_cast<double>(end - begin);
}

}  // namespace llmc
