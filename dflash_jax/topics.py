"""The project's own prompt material: subjects and the sentences they are put into (`prompts.py` multiplies them out)."""


def _lines(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for line in text.strip().splitlines() for item in line.split("|") if item.strip())


TOPICS = _lines("""
photosynthesis | black holes | the water cycle | plate tectonics | vaccines | the human heart | DNA | gravity | the speed of light
magnets | batteries | solar panels | nuclear power | earthquakes | volcanoes | climate change | coral reefs | bees and pollination
dinosaurs | evolution | the moon | comets | the periodic table | sound waves | rainbows | sleep and dreams | the immune system
antibiotics | nutrition | vitamins | stress | meditation | yoga | running a marathon | public libraries | elections | democracy
the Roman Empire | ancient Egypt | the Silk Road | the Renaissance | the Industrial Revolution | the French Revolution
the printing press | the history of writing | the Olympic Games | medieval castles | pirates | the invention of the telephone
space exploration | the Apollo program | inflation | supply and demand | compound interest | insurance | taxes | household budgets
credit scores | the stock exchange | small businesses | advertising | job interviews | remote work | team meetings
time management | leadership | negotiation | public speaking | studying for exams | learning a new language | reading novels
poetry | jazz music | the violin | photography | watercolour painting | theatre | film directing | architecture | bridges | trains
bicycles | electric cars | airplanes | sailing ships | submarines | lighthouses | maps | compasses | computers | the internet
search engines | encryption | passwords | machine learning | neural networks | databases | open source software
programming languages | recursion | sorting algorithms | binary numbers | prime numbers | probability | statistics | geometry
fractions | algebra | chess | football | tennis | swimming | mountain climbing | camping | gardening | houseplants | composting
recycling | beekeeping | cooking pasta | baking bread | coffee | tea | chocolate | cheese | spices | street food | breakfast
school lunches | home cooking | dogs | cats | horses | owls | whales | wolves | elephants | penguins | butterflies | spiders
rivers | deserts | rain forests | the Arctic | friendship | honesty | courage | growing up | moving to a new city
family holidays | birthdays | grandparents | neighbours | volunteering
""")

TOPIC_TEMPLATES = _lines("""
Explain {} to a beginner. | Explain {} to a ten-year-old child. | What are the most important facts about {}?
Why does it matter to know about {}? | Write a short story about {}. | Write a poem about {}.
Write a short dialogue between a teacher and a student about {}. | Give five tips or ideas that have to do with {}.
List ten words that are related to {} and say what each one means. | What are common misunderstandings about {}?
What are the good and the bad sides of {}? | Write three quiz questions about {} with answers.
Summarize what is known about {} in three sentences. | Write an introduction for an essay about {}.
Make an outline for a talk about {}. | Write a tweet, a headline and a slogan about {}.
Describe {} to somebody who has never heard of it. | How has our view of {} changed over time?
""")

ACTIVITIES = _lines("""
change a flat bicycle tyre | make an omelette | brew good coffee | bake a simple cake | clean a cast iron pan
sharpen a kitchen knife | plant tomatoes | water houseplants | start a compost heap | grow herbs on a windowsill | train a puppy
introduce a cat to a new home | write a cover letter | prepare for a job interview | ask for a raise
give feedback to a colleague | run a short meeting | plan a project | learn to type faster | memorize vocabulary | take good notes
study for a maths exam | read a scientific paper | write a summary | plan a trip on a small budget | pack a suitcase
survive a long flight | read a paper map | set up a tent | build a campfire | fall asleep faster | start running
stretch after sport | eat more vegetables | drink less sugar | deal with stress before an exam | save money every month
make a budget | choose a laptop | back up photos | pick a strong password | set up a home network | install Python
debug a program | write unit tests | use version control | name variables well | learn a second programming language
paint a room | fix a dripping tap | remove a coffee stain | wrap a present | write a thank-you note
make a new friend in a new city
""")

ACTIVITY_TEMPLATES = _lines("""
How do I {}? | Give me step-by-step instructions to {}. | What should I avoid when I {}?
Write a checklist for somebody who wants to {}. | My friend wants to {} but does not know how to begin. What would you say?
""")

PAIRS = _lines("""
tea and coffee | cats and dogs | trains and airplanes | books and films | city life and country life | summer and winter
butter and olive oil | Python and C | lists and tuples in Python | HTTP and HTTPS | RAM and a hard disk
a compiler and an interpreter | stacks and queues | TCP and UDP | mitosis and meiosis | viruses and bacteria | weather and climate
speed and velocity | mass and weight | renting and buying a home | atoms and molecules | savings accounts and stocks
credit cards and debit cards | novels and short stories | guitars and pianos | frogs and toads | a debit and a credit
running and swimming | electric cars and petrol cars | working at home and in an office | a manager and a leader
paper books and e-books
""")

PAIR_TEMPLATES = _lines("""
Compare {}. | What is the difference between {}? | Make a table that compares {}. | Which would you recommend, and why: {}?
""")

MESSAGES = _lines("""
asking a professor for more time for a paper | telling the team that a meeting moves to Friday
inviting friends to a birthday dinner | complaining to a shop about a broken kettle | thanking a colleague for help with a report
asking a landlord to repair the heating | applying for a summer job in a museum | declining an invitation politely
apologizing to a customer for a late delivery | announcing a new library opening to the neighbourhood
asking a bank about an unknown payment | congratulating a friend on a new job | reminding the class of a trip to the zoo
requesting a refund for a cancelled train | introducing a new member of the team | asking a doctor's office for an appointment
welcoming new members of a chess club | reporting a software bug to the developers | offering an old sofa to the neighbours
asking an expert for a short interview | resigning from a part-time job | cancelling a gym membership
""")

MESSAGE_TEMPLATES = _lines("""
Write an e-mail {}. | Write a short, friendly message {}. | Write a formal letter {}.
Write two versions of a note {}: one serious, one funny.
""")

CODE_TASKS = _lines("""
reverses a string | checks whether a word is a palindrome | counts the vowels in a sentence | returns the n-th Fibonacci number
checks whether a number is prime | lists all prime numbers below n | computes the greatest common divisor of two numbers
computes a factorial | sorts a list of numbers without using sort | merges two sorted lists
removes duplicates from a list but keeps the order | flattens a nested list | finds the two largest numbers in a list
computes the median of a list | computes the average of the values of a dictionary | inverts a dictionary
groups words by their first letter | counts how often each word occurs in a text | finds the longest word in a sentence
capitalizes every word | converts Celsius to Fahrenheit | converts a number to Roman numerals
converts a binary string to an integer | formats seconds as hours and minutes | validates an e-mail address
validates a password with several rules | parses a line of comma-separated values | reads a JSON file safely
writes a list of dictionaries to a CSV file | finds all files with a given ending in a folder | renames files in a folder
counts lines in a file | implements a stack | implements a queue with two stacks | implements a linked list
implements a binary search | implements a bank account class | traverses a binary tree in order
finds the shortest path in a grid | checks whether brackets are balanced | generates all permutations of a list
generates all subsets of a set | rotates a matrix by ninety degrees | multiplies two matrices | transposes a table
draws a triangle of stars | simulates rolling two dice | plays rock, paper, scissors | shuffles a deck of cards
guesses a number between 1 and 100 | keeps a to-do list | encodes a text with the Caesar cipher
compresses a string by run lengths | checks whether two words are anagrams | retries a function three times
measures how long a function takes | caches the results of a slow function | splits a list into chunks
finds the common elements of two lists
""")

CODE_TEMPLATES = _lines("""
Write a Python function that {}. | Write Python code that {} and explain how it works.
Write a Python program that {}, with an example of its use. | Show me a simple and a better way to write Python code that {}.
Write JavaScript code that {}. | Write Python code that {}. Add type hints and a test.
""")

# Numbers a, b, c are drawn with a < 60, 2 <= b <= 12, 2 <= c <= 30; {name} and {thing} from the lists below.
MATH_TEMPLATES = _lines("""
{name} has {a} {thing} and buys {b} boxes with {c} {thing} each. How many {thing} does {name} have now? Show your steps.
A shop sells {thing} at {b} dollars each. {name} buys {c} of them and pays with {big} dollars. How much change does {name} get?
What is {a} times {c}, minus {b}? Work it out step by step.
A train travels {speed} kilometres an hour. How far does it go in {b} hours?
{name} shares {prod} {thing} equally among {b} friends. How many does each friend get?
What is {pct}% of {big}? Explain how you get there.
A rectangle is {c} metres long and {b} metres wide. What are its area and its perimeter?
Solve for x: {b}x + {a} = {sum}. Show every step.
{name} saves {c} dollars every week. After how many weeks does {name} have at least {big} dollars?
The average of three numbers is {c}. Two of them are {a} and {b}. What is the third number?
A recipe for {b} people needs {prod} grams of flour. How much flour do {c} people need?
Write {pct}% as a fraction in lowest terms.
{name} reads {c} pages a day. The book has {big} pages. How many days does it take, and how many pages are left for the last day?
In a class of {a} students, {b} play the piano and the rest do not. What fraction of the class does not play the piano?
{name} is {b} years old and a cousin is {c} years older. How old will they be together in {b} years?
""")
MATH_NAMES = _lines("""
Anna | Ben | Chloe | David | Emma | Farid | Grace | Hugo | Ines | Jonas | Kofi | Lena | Maya | Noah | Olga | Priya
""")
MATH_THINGS = _lines("""
apples | pencils | marbles | stickers | cookies | books | oranges | stamps | shells | cards | tickets | balloons
""")

# Subjects that came later are for training only, so that the evaluation prompts, and figures on them, stay what they were.
MORE_TOPICS = _lines("""
tides | glaciers | clouds | lightning | tornadoes | hurricanes | fossils | caves | waterfalls | islands | mountains | soil | seeds
pollen | mushrooms | moss | oak trees | roses | sunflowers | wheat | rice | corn | potatoes | apples | bananas | honey | salt
sugar | olive oil | vinegar | soup | pizza | sushi | tacos | curry | ice cream | cakes | vegetarian food | food labels | hunger
allergies | the common cold | fevers | broken bones | the brain | memory | the eyes | hearing | taste and smell | the lungs | blood
muscles | bones | teeth | skin | hormones | genes | cells | bacteria | viruses | parasites | medicine | hospitals | nurses | surgery
first aid | mental health | loneliness | happiness | anger | fear | jealousy | hope | patience | kindness | curiosity | creativity
habits | goals | failure | success | money | debt | pensions | banks | trade | money laundering | patents | copyright | contracts
courts | juries | police work | constitutions | parliaments | kings and queens | revolutions | slavery | colonialism | the Cold War
the First World War | the Vikings | the Aztecs | the Maya | ancient Greece | the Ottoman Empire | the Great Wall of China
the Black Death | the Age of Exploration | the Bronze Age | cave paintings | pyramids | cathedrals | skyscrapers | roads | tunnels
canals | harbours | airports | railways | buses | motorcycles | rockets | satellites | telescopes | microscopes | lasers | radios
televisions | cameras | robots | drones | printers | 3D printing | video games | board games | puzzles | magic tricks
card games | toys | dolls | kites | origami | knitting | sewing | pottery | sculpture | opera | ballet | hip-hop | folk songs
the piano | the guitar | drums | choirs | museums | comics | cartoons | fairy tales | myths and legends | science fiction
mysteries
diaries | newspapers | journalism | podcasts | social media | e-mail | operating systems | compilers | web browsers
cloud computing
data privacy | computer viruses | spreadsheets | text editors | software testing | algorithms | graphs | matrices
calculus | logic | infinity | the number pi | symmetry | measurement | time zones | calendars | clocks | temperature
pressure | heat
energy | electricity | light | colours | atoms | chemical reactions | acids and bases | metals | glass | plastic | paper | concrete
wood | oil | coal | wind power | hydropower | recycled clothes | fashion | shoes | hats | jewellery | perfume | soap
washing machines
refrigerators | ovens | furniture | houses | apartments | gardens | parks | zoos | farms | forests | swamps | oceans | sharks
dolphins
octopuses | crabs | turtles | snakes | lizards | frogs | ants | mosquitoes | dragonflies | eagles | parrots | chickens
ducks | cows
sheep | goats | pigs | rabbits | hamsters | foxes | bears | lions | tigers | giraffes | monkeys | bats | mice | kangaroos | pandas
marriage | weddings | babies | teenagers | old age | school uniforms | homework | exams | teachers | universities | apprenticeships
hockey | basketball | baseball | golf | skiing | surfing | boxing | gymnastics | cycling | fishing | hiking | dancing | sleepovers
""")

MORE_ACTIVITIES = _lines("""
iron a shirt | sew on a button | unblock a sink | hang a picture | assemble a shelf | replace a light bulb | wash a woollen sweater
fold a fitted sheet | organize a wardrobe | clean the windows | descale a kettle | boil an egg | cook rice | make pancakes
bake cookies | roast vegetables | make a salad dressing | cook soup from leftovers | freeze fresh fruit | set a table
host a dinner party | plan a birthday party | choose a present | write an invitation | start a blog | record a podcast
edit a video | take better portraits | draw a face | learn the guitar | read sheet music | sing in tune | memorize a poem
give a toast | tell a joke | start a conversation | listen better | apologize | say no politely | end an argument | make a decision
keep a diary | get up early | stop procrastinating | focus at work | take a break | organize a desk | answer e-mails quickly
write a report | prepare slides | lead a workshop | hire a new employee | leave a job well | find a mentor | learn to swim
ride a bicycle | prepare for a marathon | lose weight slowly | lift weights safely | improve posture | treat a small cut
cool a burn | remove a splinter | calm a crying baby | teach a child to read | help with homework | choose a school
adopt a cat | walk a dog | clean an aquarium | feed wild birds | prune a rose bush | mow a lawn | build a bird house
repair a bicycle chain | check the oil of a car | change a car tyre | parallel park | read a train timetable | rent a flat
buy a used car | compare insurance | open a bank account | pay off a loan | donate to charity | vote for the first time
write to a politician | make a backup | speed up a slow computer | clean a keyboard | write a regular expression
sort a spreadsheet | make a chart | choose a programming language | read somebody else's code | write documentation
report a bug | optimize a slow loop | parse a log file | design a database table | deploy a web site
""")

MORE_PAIRS = _lines("""
bread and rice | apples and oranges | bees and wasps | rabbits and hares | crocodiles and alligators | turtles and tortoises
lakes and ponds | oceans and seas | planets and stars | comets and asteroids | rocks and minerals | heat and temperature
acids and bases | arteries and veins | genes and chromosomes | proteins and fats | fruits and vegetables | baking and roasting
jam and jelly | wine and beer | violins and cellos | poems and songs | comedy and tragedy | opinions and facts | ethics and law
a king and a president | taxes and fees | revenue and profit | stocks and bonds | wants and needs | a leader and a boss
classes and objects | arrays and linked lists | loops and recursion | functions and methods | SQL and NoSQL | Git and GitHub
threads and processes | JSON and XML | laptops and tablets | analogue and digital clocks | radio and television
football and rugby | skiing and snowboarding | tents and caravans | hotels and hostels | buses and trams | maps and globes
""")

MORE_MESSAGES = _lines("""
asking a neighbour to turn down the music | inviting parents to a school play | thanking a teacher at the end of the year
asking for directions to an office | confirming an appointment | changing the date of a booking | asking for a recipe
announcing a change of address | congratulating a couple on their wedding | wishing a friend a quick recovery
asking a library to extend a loan | telling customers about new opening hours | recruiting volunteers for a festival
asking a colleague to review some code | reporting a lost suitcase | selling an old bicycle | asking a hotel about parking
explaining an absence from work | offering help to a new neighbour | reminding a friend about borrowed money
thanking a host for a weekend | asking a company about an internship | inviting the team to a lunch
warning users about planned maintenance | asking the city to repair a street lamp | praising a restaurant
""")

MORE_CODE_TASKS = _lines("""
adds two numbers given as strings | counts the digits of a number | checks whether a number is a perfect square
checks whether a year is a leap year | computes the area of a circle | computes a power without using the power operator
computes the sum of the digits of a number | reverses the digits of a number | finds the smallest number in a list
checks whether a list is sorted | finds the second largest number | removes all zeros from a list | moves all zeros to the end
counts the even numbers in a list | multiplies all numbers of a list | adds up two lists element by element
finds the index of an element in a list | finds duplicates in a list | rotates a list by k places | zips two lists into a dictionary
merges two dictionaries | sorts a dictionary by its values | finds the key with the largest value | counts characters in a string
replaces spaces by underscores | checks whether a string contains only digits
converts a string to title case | finds the first letter that does not repeat | finds the longest common prefix of some words
checks whether one string is a rotation of another | counts words in a text | reverses the words of a sentence
removes punctuation from a text | wraps a text at 80 characters | converts kilometres to miles | converts dollars to euros
converts a decimal number to binary | converts hexadecimal to decimal | converts a date to another format
computes the days between two dates | prints a calendar of a month | prints a multiplication table
prints the numbers 1 to n with FizzBuzz
prints a pyramid of numbers | solves a quadratic equation | computes the distance between two points | computes compound interest
computes the mode of a list | computes a standard deviation | computes the least common multiple | finds the divisors of a number
checks whether a number is perfect | checks Armstrong numbers | generates Pascal's triangle | generates a random password
implements bubble sort | implements quicksort | implements merge sort | implements insertion sort | implements linear search
implements a hash table | implements a binary search tree | implements depth-first search | implements breadth-first search
implements a priority queue | implements a simple calculator | implements a timer | implements a shopping cart class
implements a student class with grades | implements a rectangle class | implements tic-tac-toe | implements hangman
reads a text file line by line | writes a list to a file | copies a file | reads the columns of a CSV file | downloads a web page
parses command line arguments | logs messages to a file | connects to a SQLite database | handles a division by zero
finds the intersection of two sets | finds all pairs with a given sum | finds the maximum subarray sum | finds a missing number
finds the longest increasing subsequence | computes the edit distance of two words | solves the Tower of Hanoi
counts islands in a grid | flattens a dictionary | deep-copies a nested list | transposes a matrix | adds two matrices
prints a matrix in spiral order | checks whether a matrix is symmetric | checks a Sudoku row | draws a square with turtle graphics
""")

KINDS = {
    "topic": (TOPICS, MORE_TOPICS, TOPIC_TEMPLATES),
    "activity": (ACTIVITIES, MORE_ACTIVITIES, ACTIVITY_TEMPLATES),
    "pair": (PAIRS, MORE_PAIRS, PAIR_TEMPLATES),
    "message": (MESSAGES, MORE_MESSAGES, MESSAGE_TEMPLATES),
    "code": (CODE_TASKS, MORE_CODE_TASKS, CODE_TEMPLATES),
}
"""subjects of which some are held out, subjects for training only, and the sentences of both"""
