package manager

import (
	"strings"
	"sync"
)

// The names that automatic client ids are made of: 256 of each, short, easy to tell
// apart, and unkind to nobody.
//
// They are split when they are first used: every role of the program pays for what a
// package computes at its start.
var (
	adjectives = sync.OnceValue(func() []string { return strings.Fields(adjectiveText) })
	animals    = sync.OnceValue(func() []string { return strings.Fields(animalText) })
)

const (
	adjectiveText = `
agile airy alert amber ample apt aqua arctic ardent artful astute autumn avid azure balmy basic
beaming beige blithe blond blue bold bouncy brave breezy bright brisk bronze bubbly busy calm candid
careful caring casual cedar charmed cheery chestnut chief chipper civic civil clean clear clever cloudy coastal
cobalt cool copper coral cordial cosmic cosy courtly crafty cream creative crimson crisp cubic curious curly
dainty dapper daring dashing deft dewy diligent direct docile dreamy dusky dusty eager early earnest easy
elated elegant emerald eminent epic even exact fabled fair famous fancy fast fearless festive fine firm
fleet floral fluent flying fond formal frank free fresh friendly frosty frugal gallant genial gentle genuine
gifted glad gleaming glowing golden good graceful grand grassy grateful great green hale handy happy hardy
hasty hazel hearty helpful hidden honest honey hopeful humble icy ideal indigo inland ivory jade jaunty
jolly jovial joyful jubilant keen kind kindly large lasting lavender leafy level light likely lilac lime
limber linen lively lofty logical lone loyal lucid lucky lunar lush magenta major maple marble marine
maroon mellow merry mighty mild mindful minty misty mobile modern modest mossy native neat nifty nimble
noble northern novel oaken oceanic olive open orange orderly pacific patient peaceful pearly perky placid plucky
plum polar polished polite prime proper proud prudent punctual quaint quick quiet radiant rapid ready regal
rosy royal ruby russet rustic sage sandy scarlet serene sharp shiny silent silken silver simple sincere
sleek smart smooth snowy snug solar solid sonic spry stable starry steady sunny swift tidy vivid`
	animalText = `
addax agouti albatross alpaca anchovy anole ant anteater antelope argali armadillo aurochs avocet axolotl badger bandicoot
barbet bass bat beaver bee beetle beluga bilby bison bittern blackbird boar bobcat bongo bonobo gharial
buffalo bulbul bunting butterfly buzzard camel canary caracal cardinal caribou carp cassowary cat catfish chamois cheetah
chickadee chinchilla chipmunk cicada civet clam cobra cockatoo cod condor coot cormorant cougar cow coyote crab
crane cricket crow cuckoo curlew deer dingo dipper dodo dolphin donkey dormouse dove dragonfly duck dugong
dunlin eagle echidna eel egret eider eland elephant elk emu ermine falcon ferret finch firefly flamingo
flounder fossa fox francolin frigatebird frog fulmar gannet gar gaur gazelle gecko gerbil gibbon giraffe gnat
gnu goat goby goldfinch goose gopher goshawk grebe grouper grouse guanaco guppy haddock halibut hamster hare
harrier hawk hedgehog heron herring hoopoe hornbill horse huia hyrax ibex ibis iguana impala jackal jaguar
jay jerboa kakapo kestrel kingfisher kite kiwi koala koi kookaburra kudu ladybird lapwing lark lemming lemur
leopard limpet linnet lion lizard llama lobster loon lorikeet lynx macaw mackerel magpie mallard mammoth manatee
manta mantis marlin marmot marten meerkat merlin mink minnow mole mongoose moose moth mouse mule muskox
narwhal newt nightjar numbat nuthatch ocelot octopus okapi opossum orca oriole oryx osprey ostrich otter owl
oyster panda pangolin panther parrot partridge peacock pelican penguin perch petrel pheasant pigeon pika pike pipit
platypus plover pony porcupine porpoise possum puffin puma python quail quokka quoll rabbit raccoon raven robin
reindeer rhino roadrunner salmon sandpiper seahorse seal shark sheep shrew skua skylark sloth snail snipe sparrow`
)
