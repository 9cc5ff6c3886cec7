"""The subjects of MMLU, C-Eval and CMMLU by the category in which they are averaged."""

from __future__ import annotations

CATEGORIES = ("STEM", "Social Sciences", "Humanities", "Other")
# Benchmark -> category -> names of subjects in files; a subject of no category counts as Other.
SUBJECTS = {
    "mmlu": {
        "STEM": """abstract_algebra astronomy college_biology college_chemistry college_computer_science
            college_mathematics college_physics computer_security conceptual_physics electrical_engineering
            elementary_mathematics high_school_biology high_school_chemistry high_school_computer_science
            high_school_mathematics high_school_physics high_school_statistics machine_learning""",
        "Social Sciences": """econometrics high_school_geography high_school_government_and_politics
            high_school_macroeconomics high_school_microeconomics high_school_psychology human_sexuality
            professional_psychology public_relations security_studies sociology us_foreign_policy""",
        "Humanities": """formal_logic high_school_european_history high_school_us_history high_school_world_history
            international_law jurisprudence logical_fallacies moral_disputes moral_scenarios philosophy prehistory
            professional_law world_religions""",
    },
    "ceval": {
        "STEM": """advanced_mathematics college_chemistry college_physics college_programming computer_architecture
            computer_network discrete_mathematics electrical_engineer high_school_biology high_school_chemistry
            high_school_mathematics high_school_physics metrology_engineer middle_school_biology middle_school_chemistry
            middle_school_mathematics middle_school_physics operating_system probability_and_statistics
            veterinary_medicine""",
        "Social Sciences": """business_administration college_economics education_science high_school_geography
            high_school_politics mao_zedong_thought marxism middle_school_geography middle_school_politics
            teacher_qualification""",
        "Humanities": """art_studies chinese_language_and_literature high_school_chinese high_school_history
            ideological_and_moral_cultivation law legal_professional logic middle_school_history modern_chinese_history
            professional_tour_guide""",
    },
    "cmmlu": {
        "STEM": """anatomy astronomy college_actuarial_science college_engineering_hydrology college_mathematics
            college_medical_statistics computer_science conceptual_physics electrical_engineering elementary_mathematics
            genetics high_school_biology high_school_chemistry high_school_mathematics high_school_physics
            machine_learning virology""",
        "Social Sciences": """ancient_chinese business_ethics chinese_civil_service_exam chinese_food_culture
            chinese_foreign_policy chinese_teacher_qualification college_education economics education
            elementary_chinese ethnology high_school_geography high_school_politics journalism management marketing
            modern_chinese professional_accounting professional_psychology public_relations security_study sociology""",
        "Humanities": """arts chinese_history chinese_literature college_law global_facts international_law
            jurisprudence logical marxist_theory philosophy professional_law world_history world_religions""",
    },
}


def category_of(benchmark: str, subject: str) -> str:
    return next((name for name, listed in SUBJECTS[benchmark].items() if subject in listed.split()), "Other")
