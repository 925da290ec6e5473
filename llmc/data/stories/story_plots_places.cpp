#include <cstddef>
#include <string>
#include <vector>

#include "llmc/data/stories/story_plots.h"

namespace llmc {
namespace {

// The numbers from `from` down to one, such as "three, two, one".
std::string countdown(int from) {
    std::string text(number_word(from));
    for (int number = from - 1; number > 0; --number) text += ", " + std::string(number_word(number));
    return text;
}

}  // namespace

void introduce(StoryTeller& s) {
    s.tell({"Once upon a time there was {a kind} {name:child} named {name}.",
            "Once there was a {name:child} named {name}, who lived {home}.",
            "{Home} there lived {a kind} {name:child} named {name}.",
            "{Name} was {a kind} {name:child} who lived {home}.",
            "This is the story of {name}, {a kind} {name:child}."});
}

std::string the_ones(const StoryTeller& s, const std::string& list, int count) {
    std::string text = "the " + s.text(list);
    for (int i = 2; i <= count; ++i) {
        text += (i == count ? " and the " : ", the ") + s.text(list + std::to_string(i));
    }
    return text;
}

void hide_and_seek(StoryTeller& s) {
    s.tell({"{Day}, {name} played hide and seek with {a animal}, {a animal2} and {a animal3}.",
            "{A animal}, {a animal2} and {a animal3} came to play hide and seek with {name}.",
            "`Let us play hide and seek!` said {name} to the {animal}, the {animal2} and the {animal3}."});
    s.tell(
        {"{Name} closed {his} eyes and counted to {goal}.", "{He} stood by a tree and counted to {goal}."});
    s.tell({"The {animal} hid {spot}, the {animal2} {spot2} and the {animal3} {spot3}.",
            "The {animal} hid {spot}. The {animal2} hid {spot2}. The {animal3} hid {spot3}."});
    s.end_paragraph();

    s.perhaps_tell({"`Here I come!` called {name}.", "`{Goal}!` {he} shouted."});
    std::vector<std::string> hidden = {"", "2", "3"};
    std::vector<std::string> found;
    while (!hidden.empty()) {
        std::vector<std::string> spots;
        for (const std::string& i : hidden) spots.push_back(s.text("spot" + i));
        s.offer("seek", spots);
        if (hidden.size() == 3) {
            s.tell({"First {he} looked {seek},", "{He} began to look {seek},"});
        } else if (hidden.size() == 2) {
            s.tell({"Next {he} looked {seek},", "Then {he} peeped {seek},"});
        } else {
            s.tell({"At last {he} looked {seek},", "Only one was missing. {Name} looked {seek},"});
        }
        const auto i = hidden.begin() + static_cast<std::ptrdiff_t>(s.index("seek"));
        s.remember("found", s.text("animal" + *i));
        s.tell(
            {"and there was the {found}!", "and out came the {found}.", "and who sat there? The {found}!"});
        s.perhaps_tell({"`You found me!` laughed the {found}."});
        found.push_back(s.text("found"));
        hidden.erase(i);
    }
    s.end_paragraph();

    s.remember("first", found.front());
    s.remember("last", found.back());
    s.tell({"The {first}, who had been found first, was the next to count to {goal}.",
            "`You were the first, {first},` said {name}. `Now you must count to {goal}.`",
            "`I won!` said the {last}. `Nobody hides as well as I do.`",
            "They were all hungry then, so they had {food:s} for lunch, and the {last} got two."});
}

void voyage(StoryTeller& s) {
    introduce(s);
    s.tell({"{He} built a little {colour} boat and called it {boat}.",
            "{He} had a little {colour} boat. Its name was {boat}."});
    s.tell({"{Day}, {he} sailed down the river as far as {place}.",
            "{Day}, {he} said goodbye to {his} {relative} and sailed to {place}."});
    s.end_paragraph();

    s.tell({"First {he} saw {sight}, then {sight2} and then {sight3}.",
            "{He} sailed past {sight}. {He} sailed past {sight2}. {He} sailed past {sight3}.",
            "Behind the first bend {he} saw {sight}. Behind the second bend {he} saw {sight2}. "
            "Behind the third bend {he} saw {sight3}."});
    s.tell({"At {place} {a animal} sat on the bank and waved.",
            "Near {place} {a animal} swam beside the boat for a while."});
    s.perhaps_tell({"Then {he} turned {boat} around and sailed back past {sight3}, {sight2} and {sight}."});
    s.end_paragraph();

    s.tell({"In the evening the {colour} boat came home.", "When the moon rose, {boat} was home again."});
    s.tell({"`What did you see?` asked {his} {relative}.",
            "`Did you sail all the way to {place}?` asked {his} {relative}.",
            "`Tell me all about it,` said {his} {relative}."});
    s.tell({"`I saw {sight}, {sight2} and {sight3},` said {name}, `and I met {a animal}.`",
            "`There was {a animal},` said {name}, `and before that I saw {sight}, {sight2} and {sight3}.`"});
    s.perhaps_tell({"`Next time I will come along,` said {his} {relative}.",
                    "`And what will you see tomorrow?` {relative:he} asked and put out the light."});
}

void night_visit(StoryTeller& s) {
    s.tell({"It was a dark night, and {name} could not sleep.",
            "{Name} and {name2} lay in bed and listened to the rain.",
            "One stormy night {name} woke up and sat very still."});
    s.tell({"There was a noise at the {opening}: {noise}.", "{Noise}, it went at the {opening}."});
    s.tell(
        {"`Is that the wind?` whispered {his} {name2:sibling} {name2}. "
         "`The wind does not go {noise},` said {name}.",
         "`Did you hear that?` whispered {his} {name2:sibling} {name2}. `{Noise}!`"});
    s.tell({"They took {a colour} lantern and went to look.",
            "{Name} lit {a colour} lantern and opened the {opening}."});
    s.end_paragraph();

    s.tell({"Outside sat a little {visitor}, wet and cold.",
            "And who was sitting there in the rain? A little {visitor}!"});
    s.tell({"`I have lost my way to {place},` it said.",
            "`May I come in?` asked the {visitor}. `I live near {place}, and that is far.`"});
    s.tell({"They gave it warm milk, and it slept {bed}.",
            "It drank a cup of warm milk and fell asleep {bed}."});
    s.end_paragraph();

    s.tell({"In the morning the sun was shining. They took the {visitor} home to {place}.",
            "In the morning the {visitor} was gone, but {bed} lay {a colour2} {find}. It was a present."});
    s.tell(
        {"Now, when it goes {noise} at night, they light the {colour} lantern and put out some milk.",
         "And when they hear {noise} at the {opening}, {name} says, `It is only the {visitor}.`",
         "Since then the {colour} lantern stands at the {opening}, so that the {visitor} can find the way."});
}

void harvest(StoryTeller& s) {
    s.tell({"{Name} planted {a vegetable}. It grew and grew until it was as big as {size}.",
            "In {name}'s garden grew {a vegetable} as big as {size}.",
            "Once {a kind} {name:child} named {name} had {a vegetable} that grew as big as {size}."});
    s.tell({"{Name} pulled and pulled, but the {vegetable} did not move.",
            "{He} pulled with both hands, but it did not move."});
    s.end_paragraph();

    std::string chain = s.text("name") + " pulled the " + s.text("vegetable");
    s.remember("caller", s.text("name"));
    int helpers = 0;
    bool out = false;
    do {
        s.begin_round(++helpers);
        s.tell({"So {caller} called the {animal#}.", "`Come and help!` {caller} called to the {animal#}.",
                "`Who can help?` asked {caller}. `I can,` said the {animal#}."});
        chain.insert(0, "the " + s.text("animal#") + " pulled " + s.text("caller") + ", ");
        s.remember("chain", chain);
        s.remember("caller", "the " + s.text("animal#"));
        s.tell({"{Chain},"});
        out = helpers == 3 || (helpers == 2 && s.choose(2) == 1);
        if (out) {
            s.tell({"and out came the {vegetable}!", "and up it came at last!"});
        } else {
            s.tell({"but the {vegetable} did not move.", "but it did not come out."});
        }
    } while (!out);
    s.end_paragraph();

    s.remember("helpers", the_ones(s, "animal", helpers));
    s.remember_number("bowls", helpers + 1);
    s.tell({"Then they made {vegetable} soup and filled {bowls} bowls, for {name}, {helpers}.",
            "{Name} thanked {helpers}, and that evening there were {bowls} bowls of "
            "{vegetable} soup on the table.",
            "They took the {vegetable} to {place} in a cart and shared it with everyone. "
            "{Helpers} had the biggest piece."});
}

void rocket(StoryTeller& s) {
    introduce(s);
    s.tell({"{He} built a rocket out of {part}, {part2} and {part3}.",
            "{Day}, {he} took {part}, {part2} and {part3} and made a rocket."});
    s.tell({"{A animal} wanted to come along.",
            "`I have always wanted to fly,` said {a animal} and climbed in, too."});
    s.tell({"They counted:", "`Are you ready?` asked {name}. Then they counted:",
            "`Hold tight!` said the {animal}."});
    s.offer("countdown", {countdown(5), countdown(6), countdown(7), countdown(8), countdown(9)});
    s.tell({"`{Countdown}!`"});
    s.end_paragraph();

    s.offer_number("few", 3, 6);
    s.tell({"Up they went, past {sky}, past {sky2} and past {sky3}.",
            "They flew past {sky} and past {sky2} and past {sky3}."});
    s.tell({"On a small star they found {few} {colour} {find:s}.",
            "There was a little garden up there, and in it lay {few} {colour} {find:s}."});
    s.remember_number("rest", s.number("few") - 1);
    s.tell({"The {animal} kept one, and {name} put the other {rest} into {his} pocket.",
            "`One for you and {rest} for me,` said {name} to the {animal}."});
    s.tell({"Then they counted again, `{Countdown}!` and flew home.",
            "`{Countdown}!` they counted, and down they came."});
    s.end_paragraph();

    s.tell({"`Where have you been?` asked {his} {relative}.",
            "{His} {relative} had made supper. `You are late,` {relative:he} said."});
    s.tell({"`We flew past {sky}, {sky2} and {sky3},` said {name}.",
            "`We saw {sky3}, {sky2} and {sky},` said the {animal}."});
    s.tell({"And {rest} {colour} {find:s} fell out of {his} pocket.",
            "Who would believe it? But there are {rest} {colour} {find:s} on the table."});
}

}  // namespace llmc
