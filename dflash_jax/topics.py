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
