// SPDX-License-Identifier: Apache-2.0
// A long text with one fact in it that nothing else in the text leads to.

export const QUESTION = "Describe the town: its market, its school and the feast in August.";

export const CODE_QUESTION = "What is the secret code of the harbour?";

export const CODE = "4821";

export const FACT = `secret code of the harbour is ${CODE}`;

export const TEXT = `The town of Marlow Sound lies where a short river meets a long bay. In winter the wind \
comes from the north, and the boats stay behind the stone wall that the grandfathers of the present fishermen \
built. In summer there are visitors, who walk along the wall in the evening and look at the lamps on the other \
side of the water.

The market opens at six in the morning on three days of the week. There is bread from two bakeries, cheese from \
the farms on the hill, and whatever the boats have brought. The woman with the blue scarf sells onions, carrots \
and, late in the year, apples of a kind that is grown nowhere else. She will tell you that the tree stood in her \
mother's garden, and that her mother never knew its name. Next to her a man repairs clocks. He says that most \
clocks do not need a repair, they need to be cleaned, and that people are the same.

Behind the market stands the school. It has four rooms and a yard with one large chestnut tree. The teacher of \
the oldest children has collected stones for thirty years; they lie on the window sills, each with a small paper \
label, and on rainy days the children may hold them. One of them fell from the sky. It is the heaviest for its \
size, and the label says only: found in the field behind the mill, after a loud night.

The mill has not turned since the flood. Its wheel is still there, black with age, and under it the water is so \
deep that nobody has ever touched the ground. A company from the city once wanted to make a hotel of it. They \
measured the walls, drew plans, and went away again, because the road over the bridge is too narrow for the \
machines that they would have needed. So the mill belongs to the swallows, who come back each spring on nearly \
the same day.

The ${FACT}.

From the mill a path leads up to the old fort. Of the fort there is a gate left, two towers of different height, \
and a long wall full of small flowers. Soldiers lived here for two hundred years without a single battle. They \
planted vegetables, kept goats, and carved their names into the soft stone of the eastern tower. One of them \
carved a whole ship, with three masts and every rope, and it is said that it took him eleven winters. When the \
last soldiers left, they gave the goats to the town, and the goats that stand on the hill today are the great \
grandchildren of those.

On the highest point there is a small house with a white roof. It belongs to the weather station. Two people \
live there, a week each, and write down every three hours how warm it is, how strong the wind blows, and what \
kind of clouds there are. They have names for clouds that are in no book. A grey wall far out over the sea is \
called the aunt, because it always stays longer than was planned. Small round clouds in the morning are the sheep \
of the doctor, after a doctor who counted everything.

The library is open in the afternoon. It was given to the town by a sea captain who had read, as he wrote in a \
letter, everything that can be read between two harbours. Half of his books are about plants, and the other half \
about the stars. In the reading room hangs a large map of the bay, drawn by hand, with the depth of the water in \
tiny figures. Fishermen come to look at it when they have lost a net. The librarian makes tea for whoever stays \
longer than an hour, and nobody is asked to leave before the lamps along the wall are lit.

In the last week of August there is a feast. Long tables are carried into the main street, every house brings \
a dish, and at midnight the oldest fisherman and the youngest pupil together ring the bell of the church. Then \
the boats go out, each with a lantern, and form a circle in the middle of the bay. For a while nobody speaks. \
After that they race home, and the one who is last has to paint the benches along the wall in the following \
spring. There are eleven benches. They are green this year, and before that they were yellow, red, and for one \
summer, because of a mistake with an order, silver.`;
