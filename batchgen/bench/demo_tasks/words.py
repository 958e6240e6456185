"""Word lists of the demonstration tasks. The model is trained on them: do not change them."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    """
    Anna Ben Clara David Emma Felix Grace Hugo Ida Jonas Karl Lena Marta Nina Oscar Paula Quinn Rosa Simon Tara
    Ulla Victor Wendy Yara Zoe Adam Bella Carlos Diana Elias Fatima George Hannah Ivan Julia Kofi Laura Mateo
    Nadia Omar Petra Rahul Sofia Thomas Uma Vera Walter Yusuf Zara Alice Boris Chen Dora Erik Farid Greta Hiro
    Irene Jack Kira Leo Mina Noah Olga Pablo Rita Sven Tina Viktor Amir Bruno Celia Dmitri Elena Frank Gina
    Henry Ines James Katya Lucas Maria Nils Otto Priya Ruth Samir Theo Vikram Wanda Ximena Yuki Zelda
    """
)

CITIES = _words(
    """
    Paris London Rome Madrid Berlin Oslo Vienna Prague Dublin Lisbon Athens Warsaw Budapest Helsinki Stockholm
    Copenhagen Brussels Amsterdam Zurich Geneva Milan Naples Porto Seville Munich Hamburg Lyon Nice Tokyo Kyoto
    Osaka Seoul Delhi Mumbai Cairo Nairobi Lagos Accra Lima Quito Bogota Santiago Toronto Boston Chicago Denver
    Seattle Austin Sydney Perth Auckland Istanbul Moscow Kiev Riga Tallinn Vilnius Zagreb Sofia Hanoi
    """
)

JOBS = _words(
    """
    doctor teacher nurse pilot farmer baker painter lawyer writer singer dancer driver chemist plumber
    carpenter gardener librarian waiter judge sailor tailor barber cook
    """
)

COLOURS = _words(
    """
    red blue green yellow black white brown purple orange pink grey silver
    """
)
PETS = _words(
    """
    cat dog rabbit horse parrot turtle hamster goat snake mouse duck pony
    """
)
FOODS = _words(
    """
    pizza soup rice bread cheese salad pasta curry sushi cake fish beans
    """
)
HOBBIES = _words(
    """
    chess tennis painting cooking swimming reading sailing hiking singing fishing dancing cycling
    """
)
DAYS = _words(
    """
    Monday Tuesday Wednesday Thursday Friday Saturday Sunday
    """
)
MONTHS = _words(
    """
    January February March April May June July August September October November December
    """
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"

THINGS = _words(
    """
    key book lamp phone ring map coin letter knife ball hat watch pen ticket wallet cup
    """
)
PLACES = _words(
    """
    drawer kitchen garden box car cupboard bag office garage attic cellar basket desk hall
    """
)
ITEMS = _words(
    """
    pens shirts books chairs cups lamps bags hats plates shoes towels bottles candles boxes tables gloves
    """
)
EVENTS = _words(
    """
    concert meeting wedding party lecture match fair workshop dinner parade quiz festival
    """
)

NOUNS = _words(
    """
    apple banana bird boat bridge bread button camera candle castle chair cloud coat corn desert door dragon
    drum eagle earth engine farm field fire flower forest fork fruit garden gate glass gold grass hammer hand
    heart hill honey horse house island jacket jar jungle kettle king kite ladder lake leaf lemon lion magnet
    market melon milk mirror moon mountain needle nest night ocean olive onion orange oven owl paper pearl
    pencil piano pillow planet potato queen quilt rain river road robot rocket roof rope rose salt sand school
    shadow shell ship silk silver sky snow spoon star stone storm street sugar summer sun table tiger tower
    train tree truck tunnel valley violin wall water wheel wind window winter wolf yard zebra
    """
)

OPPOSITES = dict(
    pair.split(":")
    for pair in _words(
        """
    hot:cold big:small up:down left:right day:night good:bad fast:slow high:low open:closed full:empty old:new
    rich:poor wet:dry hard:soft light:dark early:late happy:sad strong:weak long:short thick:thin clean:dirty
    near:far young:elderly loud:quiet sharp:blunt true:false heavy:weightless first:last inside:outside
    above:below always:never buy:sell win:lose give:take push:pull begin:end love:hate safe:dangerous
    easy:difficult wide:narrow deep:shallow smooth:rough brave:cowardly sweet:sour awake:asleep alive:dead
    correct:wrong east:west north:south
    """
    )
)

PLURALS = dict(
    pair.split(":")
    for pair in _words(
        """
    cat:cats dog:dogs house:houses tree:trees book:books car:cars bird:birds river:rivers box:boxes bus:buses
    glass:glasses dish:dishes church:churches city:cities baby:babies lady:ladies story:stories berry:berries
    leaf:leaves knife:knives wolf:wolves wife:wives shelf:shelves child:children man:men woman:women mouse:mice
    goose:geese tooth:teeth foot:feet ox:oxen sheep:sheep fish:fish person:people potato:potatoes
    tomato:tomatoes hero:heroes key:keys boy:boys day:days apple:apples table:tables chair:chairs window:windows
    flower:flowers horse:horses fox:foxes watch:watches country:countries family:families
    """
    )
)

PAST_TENSES = dict(
    pair.split(":")
    for pair in _words(
        """
    walk:walked talk:talked play:played jump:jumped look:looked go:went run:ran eat:ate see:saw take:took
    give:gave write:wrote sing:sang swim:swam drink:drank drive:drove speak:spoke break:broke buy:bought
    bring:brought think:thought teach:taught catch:caught sleep:slept keep:kept leave:left make:made find:found
    tell:told sell:sold fly:flew know:knew grow:grew come:came begin:began win:won lose:lost build:built
    send:sent read:read cut:cut
    """
    )
)

CAPITALS = dict(
    pair.split(":")
    for pair in _words(
        """
    France:Paris England:London Italy:Rome Spain:Madrid Germany:Berlin Norway:Oslo Austria:Vienna Ireland:Dublin
    Portugal:Lisbon Greece:Athens Poland:Warsaw Hungary:Budapest Finland:Helsinki Sweden:Stockholm
    Denmark:Copenhagen Belgium:Brussels Japan:Tokyo Korea:Seoul Egypt:Cairo Kenya:Nairobi Ghana:Accra Peru:Lima
    Ecuador:Quito Chile:Santiago Russia:Moscow Latvia:Riga Estonia:Tallinn Lithuania:Vilnius Croatia:Zagreb
    Bulgaria:Sofia Vietnam:Hanoi Canada:Ottawa Cuba:Havana Iran:Tehran Iraq:Baghdad Serbia:Belgrade
    """
    )
)

CATEGORIES: dict[str, list[str]] = {
    "animal": _words(
        """
    cat dog horse lion tiger wolf zebra eagle owl rabbit goat duck snake mouse
    """
    ),
    "fruit": _words(
        """
    apple banana lemon melon orange pear plum cherry grape peach mango fig
    """
    ),
    "colour": _words(
        """
    red blue green yellow black white brown purple pink grey
    """
    ),
    "vehicle": _words(
        """
    car train truck boat ship bus bicycle plane tram rocket
    """
    ),
    "furniture": _words(
        """
    chair table sofa bed desk shelf wardrobe bench stool
    """
    ),
    "instrument": ["piano", "violin", "drum", "guitar", "flute", "trumpet", "harp", "cello"],
}

POSITIVE = _words(
    """
    wonderful excellent great amazing lovely fantastic delightful superb brilliant perfect pleasant charming
    outstanding beautiful impressive
    """
)
NEGATIVE = _words(
    """
    terrible awful horrible dreadful disappointing boring poor broken dirty rude useless ugly disgusting
    unpleasant annoying
    """
)
REVIEWED = _words(
    """
    film hotel meal book service room concert phone staff soup game trip show coffee song dress camera lesson
    garden view
    """
)

TOPICS: dict[str, tuple[list[str], list[str]]] = {
    "sports": (
        ["the team", "the striker", "our goalkeeper", "the coach", "the champion", "the runner", "the tennis player"],
        [
            "won the final",
            "scored two goals",
            "lost the match",
            "trained for the race",
            "broke the record",
            "joined the league",
        ],
    ),
    "food": (
        ["the chef", "the baker", "my grandmother", "the restaurant", "the cook", "the waiter", "our kitchen"],
        [
            "served a rich soup",
            "baked fresh bread",
            "made a spicy curry",
            "fried the onions",
            "added salt to the sauce",
            "prepared a tasty salad",
        ],
    ),
    "weather": (
        ["the storm", "the forecast", "a cold wind", "heavy rain", "the sky", "thick fog", "the north"],
        [
            "brought snow to the hills",
            "promised sunshine",
            "flooded the streets",
            "turned grey before the thunder",
            "covered the coast with clouds",
            "cooled the hot afternoon",
        ],
    ),
    "music": (
        ["the orchestra", "the singer", "the guitarist", "a young pianist", "the choir", "the band", "the drummer"],
        [
            "played a new song",
            "recorded an album",
            "sang the old melody",
            "tuned the violin",
            "wrote a symphony",
            "practised the rhythm",
        ],
    ),
    "technology": (
        [
            "the programmer",
            "the laptop",
            "the new phone",
            "the server",
            "the engineer",
            "a software company",
            "the robot",
        ],
        [
            "fixed a bug in the code",
            "needs a faster processor",
            "updated the software",
            "lost its internet connection",
            "stored the data in memory",
            "released an app",
        ],
    ),
    "travel": (
        ["the tourists", "the airline", "our guide", "a family", "the passengers", "the hotel", "the backpacker"],
        [
            "booked a flight to the coast",
            "missed the train at the station",
            "packed the suitcases",
            "crossed the border by bus",
            "showed the passport at the airport",
            "planned a long journey",
        ],
    ),
}

NEUTRAL = [
    "The {thing} arrived on {day}.",
    "The {thing} is the second one this week.",
    "We talked about the {thing} on {day}.",
    "The {thing} starts at {hour} on {day}.",
    "There is a {thing} in {city}.",
    "They moved the {thing} to {day}.",
]

FOREIGN = _words(
    """
    naïve café Zürich Ærø façade señor über jalapeño Łódź Příbram İzmir Åland привет мир Москва γειά Αθήνα 東京 日本
    京都 你好 北京 안녕 서울 שלום سلام नमस्ते สวัสดี 😀 🚀 🌍 🎉 ✅ € £ ½ → ≈ ∑ √ … — «да» crème brûlée
    """
)

SYSTEMS = [
    "You are a helpful assistant.",
    "You are a careful assistant.",
    "Answer briefly.",
    "Answer with the result only.",
    "You are a small demonstration model.",
    "You answer questions exactly and without comment.",
    "Be concise.",
    "Follow the user's instruction.",
    "Reply with the answer and nothing else.",
    "You are an assistant for data processing.",
    "Give short, correct answers.",
    "You work through a long list of small jobs.",
]

RULES = """
Read the whole message before you answer.
Do not explain your answer.
Never add a greeting.
Keep the order that the user asks for.
Numbers are written with digits.
Names are written as they appear in the text.
If a list is given, use commas between its items.
Use only what the message says.
Do not repeat the question.
A label is one word.
An object is written as JSON on one line.
The user is in a hurry and wants a short reply.
Check the result twice.
Do not change capital letters unless you are asked to.
Ignore spelling mistakes in the question.
Every answer ends after the result.
Treat each request on its own.
Do not use markdown.
Write in plain English.
Questions may come in any order.
Our office is open from Monday to Friday.
The archive holds letters, tickets and reports.
Reports are read by people and by programs.
Dates are given as the name of a day.
Prices are in euros unless the text says otherwise.
""".strip().splitlines()
