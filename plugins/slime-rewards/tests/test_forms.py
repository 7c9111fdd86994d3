"""Ways to write an answer: each label with answers that equal it and near misses, by hand or by exact arithmetic."""

from __future__ import annotations

import pytest

from slime_rewards.mathematics import equal

NUMBERS = [
    # Small and large numbers: precision is relative.
    (r"1.6\times 10^{-19}", [r"1.6\times 10^{-19}", "1.6e-19", r"16\times 10^{-20}"], [r"3.2\times 10^{-19}"]),
    (r"1.6\times 10^{-19}", [r"1.60 \cdot 10^{-19}", "1.6*10^-19"], [r"-1.6\times 10^{-19}", "0", r"1.6\times 10^{19}"]),
    (r"\frac{1}{2004!}", [r"1/2004!", r"\frac{2005}{2005!}"], [r"\frac{1}{2006!}", "0", r"\frac{1}{2005!}"]),
    ("0.0000001", [r"10^{-7}", "1e-7"], ["0.0000002", "0", "1e-8"]),
    (r"6.626\times10^{-34}", ["6.626E-34"], [r"6.626\times10^{-35}", r"6.627\times10^{-34}"]),
    (r"\left(1.6\times10^{-19}, 2\right)", [r"(1.6\times 10^{-19},2)"], [r"(3.2\times 10^{-19}, 2)"]),
    (r"x = 2\times 10^{-9}", ["2e-9", "x=2e-9"], ["3e-9", r"x = 4\times 10^{-9}"]),
    (r"2\times 10^{-20}\pi", [r"\frac{2\pi}{10^{20}}"], [r"4\times 10^{-20}\pi"]),
    (r"10^{-20}x", [r"\frac{x}{10^{20}}"], [r"10^{-21}x", "0"]),
    ("123456789", ["123,456,789", "123456789.0"], ["123456788", "123456789.5"]),
    (r"2^{1000}", [r"4^{500}"], [r"2^{1000}+1", "2^{1001}"]),
    ("12345678.90", ["12345678.9"], ["12345678.91"]),
    # Decimals for other numbers.
    (r"\frac{1}{3}", ["0.333333", "0.3333333333", "1/3", "33.3333333/100"], ["0.333", "0.33", "0.3", "0.333334"]),
    (r"\frac{2}{3}", ["0.666667", "0.66666666667"], ["0.67", "0.6667", "0.666"]),
    ("0.333333", [r"\frac13", "0.33333333"], ["0.333", "0.333343"]),
    (r"\pi", ["3.14159", "3.141592653589793", "π"], ["3.14", r"\frac{22}{7}", "3.14160"]),
    (r"\sqrt{2}", ["1.41421356", "√2", r"\sqrt2", "2^{1/2}", "sqrt(2)"], ["1.4142", "1.41421357", r"\sqrt{3}", "2"]),
    ("0.5", [r"\frac{1}{2}", ".5", "0.50", "1/2", "½", r"\frac12", r"\tfrac{1}{2}"], ["0.51", "2", "5"]),
    ("2.5", [r"\frac{5}{2}", r"2\frac{1}{2}", "2 1/2", "2½", "5/2"], ["2.51", r"2\cdot\frac{1}{2}", "1", "2.50001"]),
    # Repeating decimals.
    (r"0.\overline{3}", [r"\frac{1}{3}", r"0.\dot{3}", r"0.\bar{3}", "0.333...", r"0.\bar3"], ["0", "0.3", "3", "0.33"]),
    (r"0.\overline{3}", [r"0.333\ldots", r"0.3333\dots", r"0.3\overline{3}", "0.(3)", "0.333…"], [r"0.\overline{4}"]),
    (r"0.1\overline{6}", [r"\frac16", "0.1666...", r"0.1\dot{6}"], [r"0.\overline{16}", "0.1", "0.16"]),
    (r"0.\overline{142857}", [r"\frac17", r"0.\dot{1}4285\dot{7}", "0.142857142857..."], ["0.142", "0"]),
    (r"\frac{4}{33}", [r"0.\overline{12}", r".\overline{12}"], [r"0.1\overline{2}", r"0.\overline{21}"]),
    (r"-2.\overline{3}", [r"-\frac{7}{3}"], [r"\frac73", "-2"]),
    (r"12.\overline{34}", [r"\frac{1222}{99}"], ["12", "12.34"]),
    # Constants.
    (r"1-\frac{1}{\mathrm{e}}", [r"1-\frac{1}{e}", r"1 - e^{-1}", r"1-\frac1{\text{e}}"], ["1", r"1+\frac{1}{\mathrm{e}}"]),
    (r"\mathrm{e}^2", ["e^2", r"e^{2}", r"{\rm e}^2", r"\exp(2)", r"\operatorname{e}^{2}"], ["2e", "e", r"\mathrm{e}^3"]),
    (r"\text{e}", ["e", r"\exp(1)", "2.718282"], ["2.718", "1"]),
    (r"2+3\mathrm{i}", ["2+3i", "3i+2", r"2+3\text{i}"], ["2-3i", "2", "5i", "2+3"]),
    (r"e^{\mathrm{i}\pi}", ["-1"], ["1", "e"]),
    (r"(1+i)^2", ["2i"], ["-2i", "2"]),
    (r"2\pi", [r"2π", "2pi", r"2 \pi", "2*pi", r"2\uppi", "6.283185"], [r"\pi", "2", "6.28", r"\pi^2"]),
    (r"\dfrac{\pi}{4}", ["π/4", "pi/4", r"\frac{1}{4}\pi", r"\pi/4"], [r"\frac{\pi}{3}", "4", r"\frac{4}{\pi}"]),
    (r"\infty", ["∞", r"+\infty", "infinity"], [r"-\infty", "0", "-∞"]),
    (r"\varphi", [r"\varphi"], [r"\psi", "1.618"]),
    # Thousands.
    ("32348", ["32,348", r"32,\!348", "32{,}348", r"32\,348", r"32\ 348", "32 348", r"32~348"], ["32", "348", "32.348"]),
    (r"1,000,000", ["1000000", r"10^6", r"1\,000\,000", "1e6", "1 000 000"], ["1000", "1", "1,000,001"]),
    (r"2{,}516.5", ["2516.5"], ["2516", "2"]),
    ("1000", ["1,000", "1 000", "1\u2009000", "1\u202f000"], ["1", "1000000", "0"]),
    # Percent, degrees, currency, units.
    (r"25\%", ["25%", "25", "0.25", "25 percent", r"\frac14", r"25\,\%"], ["2.5", "0.025", "2500", "26%"]),
    ("12.5%", [r"12.5\%", r"12\frac{1}{2}\%", "0.125"], ["1.25", "12", "125%"]),
    (r"90^\circ", ["90", r"90^{\circ}", "90°", "90 degrees", r"90\text{ degrees}", r"90\degree"], ["89^\\circ", "9", "0"]),
    (r"\cos 60^\circ", [r"\frac12"], [r"\cos 60", r"\frac{\sqrt{3}}{2}"]),
    (r"\$18", ["18", "$18", r"\$18.00", "18 dollars", r"18\text{ dollars}", "€18"], ["1", "8", r"\$19", r"\$1800"]),
    (r"\$32,\!348", ["32348", r"\$32,348", "$32,348.00"], ["32", r"\$32,349", "32.348"]),
    (r"-\$5", ["-5", r"\$-5"], ["5"]),
    ("18.50", [r"\$18.5", r"18.50 \text{ USD}"], ["18", "1850"]),
    ("5", ["5 cm", r"5\text{ cm}", r"5\,\mathrm{cm}", r"5~\text{cm}^2", "5 units", "5 m/s", "5 apples"], ["6 cm", "-5 cm"]),
    (r"5\text{ cm}", ["5", "5 cm", "5 centimeters"], [r"5\text{ m}", "5 mm", "4 cm"]),
    (r"4.5\times10^{33}\ \mathrm{erg/s}", ["4.5e33"], ["4.5e32"]),
    (r"10\text{ m}^2", [r"10 \mathrm{m}^{2}", "10"], ["100", "1000"]),
    (r"10\,\mathrm{m\,s^{-1}}", ["10", r"10 \text{ m/s}"], ["1"]),
    ("2.5 million", ["2500000", "2,500,000", r"2.5\text{ million}"], ["2.5", "2.5 billion"]),
    # E notation.
    ("4.5e33", [r"4.5 \times 10^{33}", "4.5E+33", "4.5*10^33", "4.5·10^33", r"4.5\cdot 10^{33}"], ["4.5", "4.5e32"]),
    ("4.5e33", ["4.5e+33", r"4.5\times10^33", "4.5 x 10^33", "4.5 × 10³³", "45e32", r"4.5\mathrm{e}33"], ["5e33", "-4.5e33"]),
    ("7.4e-12", [r"7.4 \times 10^{-12}", "7.4×10⁻¹²", "7.4 x 10^-12", "0.0000000000074"], ["7.4e12", "7.4e-13", "7.4"]),
    ("1e5", ["100000", "10^5"], ["1", "15", "10000"]),
    ("-2.5e-3", ["-0.0025", r"-\frac{1}{400}"], ["0.0025", "-2.5"]),
    # Unicode and plain text.
    ("−5", ["-5", "–5"], ["5"]),
    (r"2\sqrt{3}", ["2√3", "2*sqrt(3)", "√12", r"\sqrt{12}", "2√(3)", "2 \\cdot \\sqrt{3}"], ["√3", "2√2", r"\sqrt{3}+2"]),
    ("x^2", ["x²", "x**2", "x*x"], ["x³", "2x", "x"]),
    ("3×4", ["12", "3·4"], ["7", "34"]),
    ("12÷4", ["3"], ["48", "12"]),
    (r"\frac{\sqrt{3}}{2}", ["√3/2", "sqrt(3)/2", r"\frac{1}{2}\sqrt3", "(1/2)*sqrt(3)"], ["√3", r"\sqrt{\frac{3}{2}}"]),
    ("np.arcsin(10/13)", [r"\arcsin(10/13)", r"\arcsin{\frac{1}{1.3}}", r"\sin^{-1}(10/13)"], [r"\arccos(10/13)", "10/13"]),
    (r"3\frac{1}{2}", ["3.5", "7/2", "3 1/2", "3½", r"3 \frac{1}{2}", r"3\tfrac12"], ["1.5", "3", r"\frac{31}{2}", "3/2"]),
    (r"-1\frac{1}{4}", ["-1.25", r"-\frac54", "-1 1/4"], ["-0.75", "1.25"]),
    (r"\frac{3}{4}", ["¾", r"\frac34", r"\frac{3}4", r"\frac 34", r"3\over4", r"{3 \over 4}", "75%", "6/8"], ["4/3", "3", "34"]),
    # Roots, factorials, logarithms, bases, binomials.
    (r"\sqrt[3]{2}", ["2^{1/3}", r"2^{\frac13}", "∛2", "1.259921", "2^(1/3)"], [r"\sqrt{2}", "3\\sqrt{2}", "2^1/3"]),
    ("10!", ["3628800", "3,628,800"], ["10", "9!"]),
    (r"\ln 2", [r"\ln(2)", "ln 2", "ln(2)", r"\log_e 2", "0.693147"], [r"\log_{10} 2", "2", r"\ln 3"]),
    (r"\log_2 8", ["3", r"\log_{2}8"], ["8", r"\log_2 9"]),
    ("101_2", ["101_{2}", "101", r"101_{\text{two}}"], ["101_3", "102", "100_2"]),
    (r"2516_8", ["2516_{8}", "2516"], ["2516_7", "2515"]),
    (r"\binom{5}{2}", ["10", r"\dbinom52", r"{5 \choose 2}"], [r"\binom{5}{1}", "52", r"\frac{5}{2}"]),
    (r"|-3|", ["3"], ["-3"]),
    (r"\lfloor 3.7 \rfloor", ["3"], ["3.7", "4"]),
    ("3:2", [r"3 : 2", "6:4", r"\frac{3}{2}"], ["2:3", "3", "32"]),
    ("1:2:3", ["2:4:6", "1 : 2 : 3"], ["1:3:2", "6", "3:2:1"]),
    ("12:30", ["12:30", r"12{:}30"], ["12:31", "1:23", "12"]),
]

STRUCTURES = [
    # Equations and names of the unknown.
    ("x=5", ["5", "x = 5", r"x\,=\,5", "5=x"], ["x=6", "y=5", "6"]),
    ("5", ["x=5", r"x = 2+3 = 5", "n=5", r"\text{x} = 5", r"\approx 5", "= 5"], ["x=4", "5x"]),
    ("y = 2x+1", ["y=1+2x", "2x+1", "2x - y + 1 = 0", "y-2x=1"], ["y=2x-1", "2x", "y = 2x"]),
    ("f(x) = x^2", ["x^2", "f(x)=x^2"], ["x^3", "f(x) = x"]),
    ("x^2+y^2=4", ["y^2+x^2=4", "x^2+y^2-4=0"], ["x^2+y^2=2", "x^2-y^2=4", "4"]),
    ("x=1, y=2", ["x = 1, y = 2", r"x=1 \text{ and } y=2", "(1,2)"], ["x=2, y=1", "(2,1)", "x=1"]),
    # Sets, lists, tuples, intervals.
    ("1,2", ["1, 2", "2,1", r"\{1,2\}", "1 and 2", r"1 \text{ and } 2", r"\{2, 1\}", "1 or 2"], ["1", "1,3", "1,2,3", "12"]),
    (r"\{1,2,3\}", ["{1,2,3}", r"\{3,2,1\}", r"\left\{1,2,3\right\}", r"\lbrace 1,2,3\rbrace"], [r"\{1,2\}", r"\{1,2,4\}"]),
    ("1, 2, and 3", ["1,2,3", r"\{1,2,3\}"], ["1,2", "123"]),
    ("(1,2)", ["(1, 2)", r"\left(1,2\right)", r"\langle 1,2\rangle"], ["(2,1)", "(1,3)", "[1,2]", "1"]),
    ("(3,-2,5)", [r"\left( 3, -2, 5 \right)", r"\begin{pmatrix} 3 \\ -2 \\ 5 \end{pmatrix}"], ["(3,2,5)", "(-2,3,5)"]),
    (r"\left(3, \frac{\pi}{2}\right)", ["(3, π/2)", r"(3,\pi/2)"], [r"(3, \pi)", r"(2, \frac{\pi}{2})", "3"]),
    ("[0,1)", ["[0, 1)", r"\left[0,1\right)"], ["(0,1)", "[0,1]", "[0,2)", "0"]),
    (r"(-\infty, 3)", [r"(-∞, 3)", "x<3", r"x \in (-\infty,3)"], ["x>3", r"(-\infty, 3]", r"x \le 3", r"(3,\infty)"]),
    (r"-1 \le x < 4", ["[-1,4)", r"x\in[-1,4)", "-1≤x<4", r"-1\leq x<4"], ["[-1,4]", "(-1,4)", "-1 < x < 4"]),
    (r"(-\infty,-2)\cup(3,\infty)", ["(-∞,-2)∪(3,∞)", r"x<-2 \text{ or } x>3"], [r"(-\infty,-2)\cup[3,\infty)", r"(-2,3)"]),
    ("x > 3", ["3 < x", "x>3", "2x>6", r"(3,\infty)"], ["x<3", r"x \geq 3", "3"]),
    (r"\emptyset", [r"\varnothing", "∅", r"\{\}"], ["0", "1", r"\{0\}"]),
    (r"\mathbb{R}", [r"(-\infty,\infty)", "ℝ"], [r"\mathbb{Z}", "0"]),
    (r"\pm 5", ["±5", "5,-5", r"\{-5,5\}", r"x=\pm5", "-5, 5", r"+5 \text{ or } -5"], ["5", "-5", r"\pm 4"]),
    (r"1\pm\sqrt{2}", [r"1+\sqrt2, 1-\sqrt2", "1±√2"], [r"1+\sqrt{2}", r"2\pm\sqrt{2}"]),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", [r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"], [r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"]),
    (r"\begin{pmatrix} \frac12 \\ 0 \end{pmatrix}", [r"\begin{pmatrix} 0.5 \\ 0 \end{pmatrix}"], [r"\begin{pmatrix} 0 \\ 0.5 \end{pmatrix}"]),
    # Expressions.
    ("x^2+1", ["1+x^2", r"x^{2}+1", "(x+1)^2-2x"], ["x^2-1", "x^2", "1"]),
    (r"\frac{x+1}{2}", [r"(x+1)/2", r"\frac{1}{2}x+\frac12", "0.5x+0.5"], ["x+1/2", r"\frac{x}{2}", "x+1"]),
    (r"(x-1)(x+2)", ["x^2+x-2"], ["x^2-x-2", "(x-1)"]),
    (r"\sin^2 x", [r"1-\cos^2 x", r"(\sin x)^2", r"\sin^{2}(x)"], [r"\sin x^2", r"\cos^2 x", r"\sin x"]),
    (r"\frac{\sqrt{2}+\sqrt{6}}{4}", [r"\frac{\sqrt{6}+\sqrt{2}}{4}", r"\cos 15^\circ", r"\cos\frac{\pi}{12}"], [r"\frac{\sqrt{6}-\sqrt{2}}{4}"]),
    (r"2^{n-1}", [r"\frac{2^n}{2}"], ["2^n", "2n-1", "2^n-1"]),
    (r"\theta_a", [r"\theta_{a}"], [r"\theta_b", r"\theta"]),
    (r"I_0 e^{-t/\tau}", [r"I_0 \exp(-t/\tau)", r"I_{0}e^{-\frac{t}{\tau}}"], [r"I_0 e^{t/\tau}", "I_0"]),
    (r"\sqrt{x^2}", ["|x|"], ["x", "-x"]),
    # Words.
    (r"\text{yes}", ["yes", "Yes", r"\text{Yes}", r"\textbf{yes}", r"\mathrm{Yes}"], ["no", r"\text{no}", "y"]),
    (r"\text{Evelyn}", ["Evelyn", r"\text{Evelyn}"], ["Eve", r"\text{Briana}"]),
    (r"\text{odd}", ["odd", r"\text{ odd }"], ["even"]),
    (r"\text{(C)}", ["C", "(C)", r"\text{C}", r"\textbf{(C)}"], ["B", r"\text{(D)}"]),
    (r"\text{no solution}", ["no solution", "No solution."], ["0", "solution"]),
    (r"\text{Monday}", ["Monday"], ["Sunday"]),
    ("DNE", [r"\text{DNE}"], ["0", "E"]),
    ("10:30 AM", [r"10:30\text{ a.m.}", "10:30 am"], ["10:30 PM", "10:31 AM"]),
]


def pairs(table: list[tuple[str, list[str], list[str]]]) -> list[tuple[str, str, bool]]:
    return [
        (label, answer, right)
        for label, same, other in table
        for answers, right in (([label, *same], True), (other, False))
        for answer in dict.fromkeys(answers)
    ]


@pytest.mark.parametrize(("label", "answer", "right"), pairs(NUMBERS) + pairs(STRUCTURES))
def test_an_answer_equals_the_label_in_every_form_and_no_near_miss_does(label: str, answer: str, right: bool) -> None:
    assert equal(label, answer) is right
