"""Words that keys and lists are made of. No word occurs inside another, so that one answer is never part of another one."""

from longmoe.data.draws import Draws

ADJECTIVES = tuple("""
able agile alert amber ample ancient arid azure bashful benign bitter blithe bold brave brief bright brisk broad bronze calm candid careful cedarn chalky
charming cheerful civil coarse cobalt cold cordial cosmic costly cozy crimson crisp curious curly daily damp daring dark deep defiant delicate dense
diligent dim distant double dreamy dusty eager early easy elastic elegant eminent empty endless exact expert faint fair faithful famous fancy fearless
festive fierce final flat floral fluent fond formal frank free fresh frosty frugal full fuzzy gallant gaunt generous gentle giant gifted glad glassy
gleaming global gloomy golden graceful grand grateful grave great green gritty handy happy hardy harsh hasty hazy heavy helpful hidden hollow huge humble
icy ideal idle immense indigo inner intense ivory jolly jovial joyful keen kind lavish lazy lean level light likely limber linear little lively local lofty
lonely loud loyal lucid lucky lunar mellow merry mighty mild misty modern modest moist mossy muted mystic native neat nimble noble noisy normal novel oaken
obedient ochre odd olive opaque open orderly outer pale patient peaceful perfect placid plain playful pleasant polite polished prime primal profound proper
proud prudent pure quaint quick quiet radiant rapid rare ready regal remote rigid ripe robust rough round royal rugged rural rustic salty sandy scarlet
secret serene severe shallow shiny short shy silent silken silver simple sincere sleek slender slow small smoky smooth snowy sober social soft solemn solid
sonic sour sparse speedy spiral stark steady steep stern still stormy sturdy subtle sudden sunny supple sweet swift tame tawny tender tepid thick thin
thorny tidy timid tiny tough tranquil true trusty unique upper urban useful vacant vague valiant vast velvet vibrant violet vital vivid warm wary weary wide
wild windy wise witty wooden woolly worthy young zealous
""".split())
NOUNS = tuple("""
acorn acre actor adder agenda alcove almond altar anchor angle anvil apple apron arbor arcade archer arrow artist aspen atlas attic auburn author autumn
avenue badge bagel baker balcony ballad bamboo banana banjo banner barley barn barrel basin basket beacon beaver beetle bell bench berry bishop bison
blanket blossom boat bonfire book boulder bramble branch brass bread brick bridge brook broom bucket buffalo bugle butter button cabin cactus camel camera
canal candle canoe canvas canyon captain caravan carbon cargo carpet carrot castle cavern celery cello cherry chess chimney cider cinder circus citadel
citrus clam cliff clock clover cobbler cocoa coffee comet compass copper coral cotton cottage cougar cousin coyote crane crater cricket crystal cupboard
curtain cymbal cypress daisy dancer dawn deer delta desert diamond doctor dolphin donkey dragon drum dune eagle easel echo eclipse elbow elder elephant elm
ember emerald engine envelope estuary falcon farmer feather fennel ferry fiddle fig finch fjord flagon flame flint flute forest fossil fountain fox galaxy
galley garden garlic garnet gazelle geyser ginger giraffe glacier goblet goose gorge granite grape grove guitar gull hammer hamlet harp harvest hawk hazel
heron hermit hickory hill hinge honey horizon hornet hound hunter hyacinth iguana inlet insect iris island jackal jacket jaguar jasmine jasper jetty jewel
jigsaw journal judge juniper kayak kennel kernel kettle kitchen kite kitten koala lagoon lantern larch laurel lava lawyer ledger lemon leopard lever library
lilac lily limpet lion lizard llama lobster locust lotus lumber lynx magnet magpie mallet mango manor mantle maple marble market marsh mason meadow medal
melon merchant meteor miller mirror mitten monarch monkey monsoon morning moth motor mountain mural museum mushroom musket myrtle napkin nectar needle
nephew nest nickel nutmeg oasis oatmeal ocean octopus onion opal orchard orchid organ osprey otter oven oyster paddle pagoda painter palace panda panther
papaya parade parcel parrot parsley pasture peach pearl pebble pelican pencil pendulum pepper petal phoenix piano pickle pigeon pillar pillow pilot pine
pirate piston pizza planet plaza plum pocket poet pollen pond poplar porch portrait potato prairie prince prism puddle puffin pumpkin puppet pyramid quarry
quartz queen quilt quiver rabbit raccoon radish rafter raisin raven reef ribbon riddle river robin rocket rooster rudder saddle saffron sailor salmon sandal
sapphire satchel saucer scholar school scooter seal senator shadow shark shelter sheriff shovel shrimp shrine siren sketch skunk slipper snail soldier
sonnet spider spinach sponge spoon squirrel stadium station statue steamer stork stream studio summit sunset swallow swan sword tadpole tailor tango
tapestry teacher teapot temple tennis terrace theater thimble thistle throne thunder ticket tiger timber toast tomato topaz tortoise tower trader train
treasure trumpet tulip tundra tunnel turtle umbrella uncle valley vase vault velcro vessel village vineyard viola viper volcano voyage waffle wagon walnut
walrus warden weaver whale wheat whistle widow willow window winter wizard wolf wombat wrench yacht yogurt zebra zephyr zigzag zinc zither
""".split())
NUM_PAIRS = len(ADJECTIVES) * len(NOUNS)
_SINGLES = ADJECTIVES + NOUNS


def pair(number: int) -> str:
    """The adjective-noun pair of a number below NUM_PAIRS, such as "amber-hill"."""
    return f"{ADJECTIVES[number // len(NOUNS)]}-{NOUNS[number % len(NOUNS)]}"


def draw_pairs(draws: Draws, count: int, taken: frozenset[str] = frozenset()) -> list[str]:
    """`count` different adjective-noun pairs, none of them in `taken`. ValueError past NUM_PAIRS."""
    places = draws.distinct(NUM_PAIRS, min(count + len(taken), NUM_PAIRS))
    pairs = [name for place in places.tolist() if (name := pair(place)) not in taken][:count]
    if len(pairs) < count:
        raise ValueError(f"count: got {count}, wanted at most {NUM_PAIRS - len(taken)}, the adjective-noun pairs there are")
    return pairs


def draw_words(draws: Draws, count: int) -> list[str]:
    """`count` different words: single ones while they last, else hyphenated pairs of any two. ValueError past the pairs there are."""
    size = len(_SINGLES)
    if count <= size:
        return [_SINGLES[place] for place in draws.distinct(size, count).tolist()]
    if count > size * size:
        raise ValueError(f"count: got {count}, wanted at most {size * size}, the pairs of words there are")
    return [f"{_SINGLES[place // size]}-{_SINGLES[place % size]}" for place in draws.distinct(size * size, count).tolist()]
