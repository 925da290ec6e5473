#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/data/stories/story_plots.h"

namespace llmc {

void lost_and_found(StoryTeller& s) {
    introduce(s);
    s.tell({"What {he} loved best in the world was {his} {colour} {thing}.",
            "{He} had {a colour} {thing} and took it everywhere.",
            "For {his} birthday {he} got {a colour} {thing}."});
    s.end_paragraph();

    s.tell({"{Day}, {name} took the {thing} along to {place}.",
            "{Day}, {he} walked to {place} with the {thing} under {his} arm.",
            "{Day}, {he} went out to play near {place}, and of course the {thing} came too."});
    s.tell({"{He} fell asleep in the sun, and when {he} woke up, the {thing} was gone.",
            "{He} put it down to watch the clouds, and when {he} looked again, it was gone.",
            "{He} climbed a tree to look at a nest, and when {he} came down, the {thing} was gone."});
    s.perhaps_tell(
        {"{He} looked left and right and up and down.", "`Oh no!` {he} cried. `Where can it be?`"});
    s.end_paragraph();

    s.tell({"`Have you seen my {colour} {thing}?` {he} asked {a animal}.",
            "Then {a animal} came by. `Did you see {a colour} {thing}?` asked {name}.",
            "`Why are you so sad?` asked {a animal}. `My {colour} {thing} is gone,` said {name}."});
    s.remember("helper", s.text("animal"));
    if (s.choose(2) == 1) {
        s.tell({"`I have not seen it,` said the {animal}, `but the {animal2} may know.`",
                "The {animal} shook its head. `Ask the {animal2},` it said.",
                "`I was asleep,` said the {animal}. `But the {animal2} sees everything.`"});
        s.perhaps_tell({"So {name} went to the {animal2} and asked again."});
        s.remember("helper", s.text("animal2"));
    }
    s.tell({"The {helper} thought for a while. `I saw it {spot},` it said.",
            "`Do not cry,` said the {helper}. `It is {spot}.`",
            "`The wind took it,` said the {helper}. `Now it lies {spot}.`"});
    s.end_paragraph();

    s.tell({"{Name} ran back and looked {spot}, and there was the {colour} {thing}!",
            "And there it was, {spot}, the {colour} {thing}!",
            "It was true! The {colour} {thing} lay {spot}."});
    s.perhaps_tell(
        {"`Thank you, dear {helper}!` {he} called.", "{He} was so happy that {he} hugged the {helper}."});
    s.tell({"That night the {colour} {thing} lay beside {his} bed.",
            "From that day on, {name} always held the {thing} tight when {he} went to {place}.",
            "{Name} and the {helper} played with the {thing} until the sun went down."});
}

void basket(StoryTeller& s) {
    s.offer_number("several", 6, 10);
    s.tell({"{Day}, {name} filled a basket with {several} {food:s}.",
            "{Day}, {name} put {several} {food:s} into a basket.",
            "{Name} picked up {his} basket. There were {several} {food:s} in it."});
    s.tell({"They were for {his} {relative}, who lived near {place}.",
            "{He} wanted to take them to {his} {relative}, who lived near {place}.",
            "`I will take them to my {relative} near {place},` {he} said."});
    s.end_paragraph();

    int left = s.number("several");
    int guests = 0;
    do {
        s.begin_round(++guests);
        s.tell({"On the way {he} met {a animal#}.", "Soon {a animal#} came down the road.",
                "A little later {a animal#} came along."});
        s.tell({"`I am so hungry,` said the {animal#}.", "`I have had no breakfast,` said the {animal#}.",
                "`What smells so good?` asked the {animal#}."});
        const std::string food = s.text("food");
        s.offer("gift",
                left > 4 ? std::vector{"one " + food, "two " + plural_of(food)} : std::vector{"one " + food});
        s.tell({"{Name} gave it {gift}.", "`Here you are,` said {name}, and gave it {gift}.",
                "It got {gift} and said thank you."});
        left -= static_cast<int>(s.index("gift")) + 1;
        s.remember_number("left", left);
        s.tell({"Now there were {left} {food:s} in the basket.", "Now {he} had {left} {food:s}.",
                "That left {left} {food:s}."});
    } while (guests < 2 || (guests < 3 && left > 3 && s.choose(2) == 1));
    s.remember("guests", the_ones(s, "animal", guests));
    s.end_paragraph();

    s.tell({"At last {he} came to the house near {place}, and {his} {relative} looked into the basket.",
            "{His} {relative} stood at the door and looked into the basket."});
    s.tell({"`{Left} {food:s}!` {relative:he} said. `How kind of you!`",
            "`Thank you for the {left} {food:s}!` {relative:he} said.",
            "`Only {left} {food:s}?` {relative:he} asked."});
    s.tell({"`There were {several}, but {guests} were hungry,` said {name}.",
            "`I had {several}, but I met {guests},` said {name}."});
    s.tell({"Then they sat in the garden and ate all {left} of them.",
            "{His} {relative} laughed, and they ate the {left} {food:s} together.",
            "`Then {left} is just enough,` said {his} {relative}."});
}

void collection(StoryTeller& s) {
    s.tell({"{Day}, {name} and {name2} went to {place} to look for {find:s}.",
            "{Name} and {name2} loved to look for {find:s}. {Day}, they went to {place}.",
            "`Let us look for {find:s}!` said {name} to {name2}, and they ran to {place}."});
    s.offer_number("few", 2, 6);
    s.offer_number("few2", 2, 6);
    s.tell({"{Name} found {few}, and {name2} found {few2}.",
            "{Name} found {few} {find:s}. {Name2} found {few2}."});
    int total = s.number("few") + s.number("few2");
    s.remember_number("total", total);
    s.tell({"`That makes {total} {find:s},` said {name2}.", "`Together we have {total},` said {name}.",
            "So they had {total} {find:s} together."});
    s.tell({"They put them into {a colour} {box}.", "All of them went into {a colour} {box}."});
    s.end_paragraph();

    s.offer_number("more", 2, 4);
    s.tell({"Then {a animal} came and brought them {more} more.",
            "`I have some, too,` said {a animal}, and gave them {more} more.",
            "`What are you looking for?` asked {a animal}. It knew where to find {more} more."});
    total += s.number("more");
    s.remember_number("total", total);
    s.tell({"Now there were {total}.", "Now they had {total} {find:s}.",
            "`{Total}!` cried {name}. `What luck!`"});
    s.end_paragraph();

    if (s.choose(2) == 1) {
        s.remember_number("without", total - 1);
        s.tell({"But at home they counted only {without}.",
                "At home {name2} counted them again. There were only {without}!"});
        s.tell({"They ran back to {place}, and there was the lost {find}, {spot}."});
        s.perhaps_tell({"The {animal} was guarding it.", "The {animal} had helped them to look."});
    } else {
        s.tell({"On the way home they sang and counted all {total} of them.",
                "They waved to the {animal} and went home."});
    }
    s.tell({"Now {total} {find:s} lie on the shelf in the {colour} {box}.",
            "If you visit {name}, you can see {a colour} {box} with {total} {find:s} in it.",
            "Every night {name2} looks into the {colour} {box} and counts to {total}."});
}

void present(StoryTeller& s) {
    s.offer_number("several", 6, 10);
    s.offer_number("few", 2, 4);
    s.tell({"It was {name2}'s birthday, and {name} had {several} coins to buy a present.",
            "{Name} had {several} coins. {He} wanted to buy a present for {name2}."});
    s.tell({"{Name2} liked {colour} things best of all.",
            "`It must be {colour},` {he} thought. `{Name2} loves {colour}.`"});
    s.end_paragraph();

    s.tell({"At the market {a seller} showed {him} {a colour2} {thing}.",
            "{A seller} at the market had {a colour2} {thing}."});
    s.tell({"It was fine, but it was {colour2} and not {colour}.",
            "`Is there no {colour} one?` asked {name}.",
            "`I am sorry,` said {name}, `but it has to be {colour}.`"});
    s.tell({"Then {he} saw {a colour} {thing2}.", "The {seller} smiled and held up {a colour} {thing2}.",
            "And what hung next to the {thing}? {A colour} {thing2}!"});
    s.tell({"It cost {few} coins,", "`{Few} coins, please,` said the {seller},"});
    s.remember_number("rest", s.number("several") - s.number("few"));
    s.tell({"so {name} had {rest} coins left.", "and that left {rest} coins in {his} pocket."});
    s.tell({"With the other {rest} {he} bought {a treat}.", "They were just enough for {a treat}."});
    s.end_paragraph();

    s.tell({"{Name2} opened the present and jumped for joy.",
            "{Name} hid the {thing2} behind {his} back. `Guess!` {he} said."});
    s.tell({"`{A colour} {thing2}!` {name2} cried. `Thank you, {name}!`",
            "`Is it {colour}?` asked {name2}. It was!"});
    s.tell({"Then they shared the {treat}.", "They ate the {treat} under a tree near {place}.",
            "And the {treat}? It was gone before the sun went down."});
}

void letters(StoryTeller& s) {
    s.tell({"{Name} brought the letters to everyone near {place}.",
            "{Name} was {a kind} {name:child} who carried the letters to everyone near {place}."});
    s.tell(
        {"{Day}, {he} had three: {a colour} one for the {animal}, "
         "{a colour2} one for the {animal2} and {a colour3} one for the {animal3}.",
         "{Day}, there was {a colour} letter for the {animal}, "
         "{a colour2} letter for the {animal2} and {a colour3} letter for the {animal3}."});
    s.end_paragraph();

    std::vector<std::string> waiting = {"", "2", "3"};
    while (!waiting.empty()) {
        std::vector<std::string> animals;
        for (const std::string& i : waiting) animals.push_back(s.text("animal" + i));
        s.offer("next", animals);
        if (waiting.size() == 3) {
            s.tell({"First {he} came to the {next}", "{He} began with the {next}"});
        } else if (waiting.size() == 2) {
            s.tell({"Then {he} found the {next}", "Next {he} knocked at the door of the {next}"});
        } else {
            s.tell({"Last of all {he} came to the {next}", "Now only the {next} was waiting. {Name} smiled"});
        }
        const auto i = waiting.begin() + static_cast<std::ptrdiff_t>(s.index("next"));
        s.remember("right", s.text("colour" + *i));
        s.tell({"and gave it the {right} letter.", "and took out the {right} letter."});
        s.perhaps_tell({"`For me?` asked the {next}.", "`How lovely!` said the {next}."});
        waiting.erase(i);
    }
    s.end_paragraph();

    s.tell({"All three letters said the same: `Come to {place} tonight! There will be {food:s}.`",
            "And what was in the letters? `Tonight we eat {food:s} near {place},` they said."});
    s.remember("guests", the_ones(s, "animal", 3));
    s.tell({"So {guests} met there and ate {food:s} until the stars came out.",
            "`Come with us, {name}!` said {guests}. And {he} did.",
            "And who had written them? It was {name}, who loved {food:s} and had no one to eat them with."});
}

void seed(StoryTeller& s) {
    introduce(s);
    s.tell({"{Day}, {he} found a seed near {place}.", "Near {place} {he} found a seed as small as a crumb."});
    s.tell({"`Nothing will come of it,` said {a animal}.", "`That is only a bit of dust,` said {a animal}."});
    s.tell({"But {name} put it into {a colour} pot.", "{He} planted it in {a colour} pot all the same."});
    s.end_paragraph();

    s.tell({"{He} gave it water every day.", "Every morning {he} gave it water and sang it a song."});
    s.tell({"One day passed.", "One day went by."});
    static constexpr std::array<std::string_view, 5> days = {"Two", "Three", "Four", "Five", "Six"};
    std::size_t passed = 0;
    do {
        s.remember("days", std::string(days[passed++]));
        s.tell({"{Days} days passed."});
    } while (passed < 2 || (passed < days.size() && s.choose(2) == 1));
    s.tell({"Then there was a tiny green leaf!",
            "`Do you see anything?` asked the {animal}. And there was a leaf!"});
    s.remember_number("waited", static_cast<int>(passed) + 1);
    s.tell({"It grew into {a colour2} {flower} as tall as {name}.",
            "Out came {a colour2} {flower}, the finest of all."});
    s.end_paragraph();

    s.tell({"`I have never seen such {a colour2} {flower},` said the {animal}. `How did you do it?`",
            "The {animal} came to smell the {colour2} {flower}. `What is the secret?` it asked."});
    s.tell({"`I only waited {waited} days,` said {name}.",
            "`It took some water and {waited} days,` said {name}."});
    s.tell({"Then {he} took the {colour} pot back to {place}, where the seed had come from.",
            "Today there are {colour2} {flower:s} all around {place}.",
            "And the next seed in the {colour} pot was for the {animal}."});
}

}  // namespace llmc
