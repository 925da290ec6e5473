#include "llmc/data/stories/story_teller.h"

#include <algorithm>
#include <cctype>
#include <functional>
#include <iterator>
#include <utility>

#include "llmc/core/error.h"

namespace llmc {
namespace {

std::string with_quotation_marks(std::string_view text) {
    std::string marked(text);
    std::ranges::replace(marked, '`', '"');
    return marked;
}

bool is_capital(char c) { return c >= 'A' && c <= 'Z'; }

std::string capitalised(std::string text) {
    text[0] = static_cast<char>(std::toupper(text[0]));
    return text;
}

// Decides by the first letter; no word that follows an article in the stories is an exception.
std::string with_article(const std::string& text) {
    return (std::string_view("aeiou").find(text[0]) == std::string_view::npos ? "a " : "an ") + text;
}

std::string_view one_of(Pronoun pronoun, std::string_view it, std::string_view she, std::string_view he) {
    return pronoun == Pronoun::it ? it : pronoun == Pronoun::she ? she : he;
}

std::string lower_first(std::string_view text) {
    std::string lower(text);
    lower[0] = static_cast<char>(std::tolower(lower[0]));
    return lower;
}

bool is_digit(char c) { return c >= '1' && c <= '9'; }

// "animal2" -> "animal"
std::string_view without_digit(std::string_view slot) {
    return is_digit(slot.back()) ? slot.substr(0, slot.size() - 1) : slot;
}

}  // namespace

std::vector<std::string_view> StoryTeller::fresh(std::initializer_list<std::string_view> variants) const {
    std::vector<std::string_view> untold;
    std::ranges::copy_if(variants, std::back_inserter(untold),
                         [&](std::string_view variant) { return !told_.contains(variant); });
    return untold.empty() ? variants : untold;
}

void StoryTeller::tell(std::initializer_list<std::string_view> variants) {
    const auto candidates = fresh(variants);
    write_sentence(candidates[choose(candidates.size())]);
}

void StoryTeller::perhaps_tell(std::initializer_list<std::string_view> variants) {
    const auto candidates = fresh(variants);
    const std::size_t choice = choose(candidates.size() + 1);
    if (choice > 0) write_sentence(candidates[choice - 1]);
}

void StoryTeller::end_paragraph() {
    chooser_.write("\n");
    paragraph_begins_ = true;
}

void StoryTeller::end_story() { chooser_.write("\n\n"); }

void StoryTeller::offer(std::string_view slot, std::vector<std::string> words) {
    const std::string name = slot_name(slot);
    held_.erase(name);
    offers_[name] = std::move(words);
}

void StoryTeller::offer_number(std::string_view slot, int low, int high) {
    std::vector<std::string> words;
    for (int number = low; number <= high; ++number) words.emplace_back(number_word(number));
    offer(slot, std::move(words));
}

void StoryTeller::remember(std::string_view slot, std::string text) {
    held_[slot_name(slot)] = {std::move(text), Pronoun::it, 0};
}

void StoryTeller::remember_number(std::string_view slot, int number) {
    remember(slot, std::string(number_word(number)));
}

void StoryTeller::begin_round(int round) {
    check(round >= 1 && round <= 9, "a round has one digit");
    round_ = round == 1 ? "" : std::to_string(round);
}

std::string StoryTeller::slot_name(std::string_view slot) const {
    return slot.ends_with('#') ? std::string(slot.substr(0, slot.size() - 1)) + round_ : std::string(slot);
}

const StoryTeller::Held& StoryTeller::known(std::string_view slot) const {
    const auto found = held_.find(slot_name(slot));
    if (found == held_.end()) programming_error(fmt::format("the story has not told '{}' yet", slot));
    return found->second;
}

const StoryTeller::Held& StoryTeller::hold(const std::string& slot) {
    const auto found = held_.find(slot);
    if (found != held_.end()) return found->second;
    return held_[slot] = draw(slot);
}

StoryTeller::Held StoryTeller::draw(const std::string& slot) {
    if (const auto offered = offers_.find(slot); offered != offers_.end()) {
        const std::size_t index = choose(offered->second.size());
        return {offered->second[index], Pronoun::it, index};
    }
    const std::string_view role = without_digit(slot);
    const auto taken = [&](const StoryWord& word) {
        return std::any_of(held_.begin(), held_.end(), [&](const auto& entry) {
            return without_digit(entry.first) == role && entry.second.text == word.text;
        });
    };
    std::vector<StoryWord> free;
    std::ranges::copy_if(story_words(role), std::back_inserter(free), std::not_fn(taken));
    const std::size_t index = choose(free.size());
    return {std::string(free[index].text), free[index].pronoun, index};
}

// The text that replaces a slot. `slot` is the part between { and }.
std::string StoryTeller::fill(std::string_view slot) {
    const bool capital = is_capital(slot[0]);
    const bool article = slot.size() > 2 && slot[1] == ' ';
    if (article) slot.remove_prefix(2);
    const std::size_t colon = slot.find(':');
    std::string name = lower_first(slot.substr(0, colon));
    std::string form = colon == slot.npos ? "" : std::string(slot.substr(colon + 1));
    if (const std::string_view word = without_digit(name); word == "he" || word == "him" || word == "his") {
        form = word;
        name = "name" + name.substr(word.size());
    }

    const Held& held = hold(slot_name(name));
    std::string text = held.text;
    if (form == "s") text = plural_of(text);
    if (form == "he") text = one_of(held.pronoun, "it", "she", "he");
    if (form == "him") text = one_of(held.pronoun, "it", "her", "him");
    if (form == "his") text = one_of(held.pronoun, "its", "her", "his");
    if (form == "child") text = one_of(held.pronoun, "child", "girl", "boy");
    if (form == "sibling") text = one_of(held.pronoun, "twin", "sister", "brother");
    if (article) text = with_article(text);
    return capital ? capitalised(text) : text;
}

// Writes piece by piece, because the words of a slot must be chosen after all the text before it is written.
void StoryTeller::write_sentence(std::string_view sentence) {
    if (!paragraph_begins_) chooser_.write(" ");
    paragraph_begins_ = false;
    told_.insert(sentence);
    while (!sentence.empty()) {
        const std::size_t open = std::min(sentence.find('{'), sentence.size());
        if (open > 0) chooser_.write(with_quotation_marks(sentence.substr(0, open)));
        sentence.remove_prefix(open);
        if (sentence.empty()) return;
        const std::size_t close = sentence.find('}');
        check(close != sentence.npos, "a slot ends with }");
        chooser_.write(fill(sentence.substr(1, close - 1)));
        sentence.remove_prefix(close + 1);
    }
}

}  // namespace llmc
