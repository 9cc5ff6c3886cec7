"""The subjects of MMLU, C-Eval and CMMLU, with the category that LLaMA-Factory counts each in and its Chinese name."""

from __future__ import annotations

from typing import NamedTuple

CATEGORIES = ("STEM", "Social Sciences", "Humanities", "Other")


class Subject(NamedTuple):
    """A subject's name in prompts, and its category."""

    name: str
    category: str


_MMLU = {
    "STEM": """abstract_algebra astronomy college_biology college_chemistry college_computer_science college_mathematics
        college_physics computer_security conceptual_physics electrical_engineering elementary_mathematics
        high_school_biology high_school_chemistry high_school_computer_science high_school_mathematics
        high_school_physics high_school_statistics machine_learning""",
    "Social Sciences": """econometrics high_school_geography high_school_government_and_politics
        high_school_macroeconomics high_school_microeconomics high_school_psychology human_sexuality
        professional_psychology public_relations security_studies sociology us_foreign_policy""",
    "Humanities": """formal_logic high_school_european_history high_school_us_history high_school_world_history
        international_law jurisprudence logical_fallacies moral_disputes moral_scenarios philosophy prehistory
        professional_law world_religions""",
    "Other": """anatomy business_ethics clinical_knowledge college_medicine global_facts human_aging management
        marketing medical_genetics miscellaneous nutrition professional_accounting professional_medicine virology""",
}
_CEVAL = {
    "STEM": """advanced_mathematics=高等数学 college_chemistry=大学化学 college_physics=大学物理
        college_programming=大学编程 computer_architecture=计算机组成 computer_network=计算机网络
        discrete_mathematics=离散数学 electrical_engineer=注册电气工程师 high_school_biology=高中生物
        high_school_chemistry=高中化学 high_school_mathematics=高中数学 high_school_physics=高中物理
        metrology_engineer=注册计量师 middle_school_biology=初中生物 middle_school_chemistry=初中化学
        middle_school_mathematics=初中数学 middle_school_physics=初中物理 operating_system=操作系统
        probability_and_statistics=概率统计 veterinary_medicine=兽医学""",
    "Social Sciences": """business_administration=工商管理 college_economics=大学经济学 education_science=教育学
        high_school_geography=高中地理 high_school_politics=高中政治
        mao_zedong_thought=毛泽东思想和中国特色社会主义理论体系概论 marxism=马克思主义基本原理
        middle_school_geography=初中地理 middle_school_politics=初中政治 teacher_qualification=教师资格""",
    "Humanities": """art_studies=艺术学 chinese_language_and_literature=中国语言文学 high_school_chinese=高中语文
        high_school_history=高中历史 ideological_and_moral_cultivation=思想道德修养与法律基础 law=法学
        legal_professional=法律职业资格 logic=逻辑学 middle_school_history=初中历史 modern_chinese_history=近代史纲要
        professional_tour_guide=导游资格""",
    "Other": """accountant=注册会计师 basic_medicine=基础医学 civil_servant=公务员 clinical_medicine=临床医学
        environmental_impact_assessment_engineer=环境影响评价工程师 fire_engineer=注册消防工程师 physician=医师资格
        plant_protection=植物保护 sports_science=体育学 tax_accountant=税务师
        urban_and_rural_planner=注册城乡规划师""",
}
_CMMLU = {
    "STEM": """anatomy=解剖学 astronomy=天文学 college_actuarial_science=大学精算学
        college_engineering_hydrology=大学工程水文学 college_mathematics=大学数学
        college_medical_statistics=大学医学统计 computer_science=计算机科学 conceptual_physics=概念物理学
        electrical_engineering=电气工程
        elementary_mathematics=初等数学 genetics=遗传学 high_school_biology=高中生物 high_school_chemistry=高中化学
        high_school_mathematics=高中数学 high_school_physics=高中物理学 machine_learning=机器学习 virology=病毒学""",
    "Social Sciences": """ancient_chinese=古汉语 business_ethics=商业伦理 chinese_civil_service_exam=中国公务员考试
        chinese_food_culture=中国饮食文化 chinese_foreign_policy=中国外交政策 chinese_teacher_qualification=中国教师资格
        college_education=大学教育学 economics=经济学 education=教育学 elementary_chinese=小学语文 ethnology=民族学
        high_school_geography=高中地理 high_school_politics=高中政治 journalism=新闻学 management=管理学
        marketing=市场营销 modern_chinese=现代汉语 professional_accounting=专业会计 professional_psychology=专业心理学
        public_relations=公共关系 security_study=安全研究 sociology=社会学""",
    "Humanities": """arts=艺术学 chinese_history=中国历史 chinese_literature=中国文学 college_law=大学法律
        global_facts=全球事实 international_law=国际法学 jurisprudence=法理学 logical=逻辑学
        marxist_theory=马克思主义理论 philosophy=哲学 professional_law=专业法学 world_history=世界历史
        world_religions=世界宗教""",
    "Other": """agronomy=农学 chinese_driving_rule=中国驾驶规则 clinical_knowledge=临床知识 college_medicine=大学医学
        computer_security=计算机安全 construction_project_management=建设工程管理 elementary_commonsense=小学常识
        elementary_information_and_technology=小学信息技术 food_science=食品科学 human_sexuality=人类性行为
        legal_and_moral_basis=法律与道德基础 nutrition=营养学 professional_medicine=专业医学 sports_science=体育学
        traditional_chinese_medicine=中医中药""",
}


def _subjects(listed: dict[str, str]) -> dict[str, Subject]:
    entries = [(*entry.partition("="), category) for category, text in listed.items() for entry in text.split()]
    return {key: Subject(name or key.replace("_", " "), category) for key, _, name, category in entries}


SUBJECTS = {"mmlu": _subjects(_MMLU), "ceval": _subjects(_CEVAL), "cmmlu": _subjects(_CMMLU)}


def subject_of(benchmark: str, key: str) -> Subject:
    """A subject by its name in files; one that the benchmark does not have counts as Other."""
    return SUBJECTS[benchmark].get(key) or Subject(key.replace("_", " "), "Other")
